"""Random models that read images and text, of the families that llama.cpp runs, as folders of transformers."""

import base64
import io
import json

import torch
from PIL import Image
from tokenizers import AddedToken, processors
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from tests.reference import gguf_models

IMAGE_SIZE = 32
SIDE = 2
"""Tokens of an image in each direction."""
NAMES = {
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    "idefics3": ["<image>", "\n\n", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"],
}
NAMES["smolvlm"] = NAMES["idefics3"]
FIRST = gguf_models.VOCABULARY + 8
_TEXT = gguf_models._COMMON | {"vocab_size": FIRST + 8, "tie_word_embeddings": True}
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7], "size": {"longest_edge": IMAGE_SIZE}}


def _gemma3():
    return Gemma3Config(
        text_config=Gemma3TextConfig(**_TEXT, **gguf_models._GEMMA),
        vision_config=SiglipVisionConfig(**_TOWER, vision_use_head=False),
        mm_tokens_per_image=SIDE**2,
        image_token_index=FIRST,
        boi_token_index=FIRST + 1,
        eoi_token_index=FIRST + 2,
    )


def _idefics3(config_class, *, tied):
    text = LlamaConfig(**_TEXT | {"tie_word_embeddings": tied})
    return config_class(
        text_config=text, vision_config=_TOWER, image_token_id=FIRST, pad_token_id=0, tie_word_embeddings=tied
    )


MODELS = {
    "gemma3": (Gemma3ForConditionalGeneration, _gemma3),
    "idefics3": (Idefics3ForConditionalGeneration, lambda: _idefics3(Idefics3Config, tied=False)),
    "smolvlm": (SmolVLMForConditionalGeneration, lambda: _idefics3(SmolVLMConfig, tied=True)),
}


def token(name, text):
    """Return the number of one of the `NAMES` of a family."""
    return FIRST + NAMES[name].index(text)


def save(name, folder):
    """Write a random model with tokenizer and settings of its image processor, and return it with the tokenizer."""
    tokenizer = gguf_models.TOKENIZERS["gpt-2"]()
    tokenizer.add_special_tokens([f"<unused{number}>" for number in range(FIRST - gguf_models.VOCABULARY)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in NAMES[name]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ends = gguf_models.SPECIAL["ends"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=gguf_models.CHAT, **ends)
    fast.save_pretrained(folder)
    model = _build(name, fast)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model, fast


def _build(name, tokenizer):
    """Return a random model that predicts only whole characters: the server tells no probabilities of parts."""
    model_class, settings = MODELS[name]
    torch.manual_seed(7)
    model = model_class(settings()).float().eval()
    texts = [tokenizer.decode([number], skip_special_tokens=True) for number in range(_TEXT["vocab_size"])]
    unlikely = [number for number, text in enumerate(texts) if not text or "\ufffd" in text]
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            scale = 0.05 if "embed_tokens" in key else 0.3 if parameter.ndim == 1 else 0.2
            start = parameter if parameter.ndim == 1 else 0
            parameter.copy_(start + torch.randn_like(parameter) * scale)
        model.get_output_embeddings().weight[unlikely] *= 0.01
    return model


def picture(seed):
    """Return the pixels of a random image of the tower's size, and its file."""
    shape = (IMAGE_SIZE, IMAGE_SIZE, 3)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return pixels, base64.b64encode(file.getvalue()).decode()


def image_inputs(name, pixels):
    """Return what llama.cpp puts around the tokens of an image, and the images in the order of their tokens."""
    mean, deviation = (torch.tensor(PIXELS[f"image_{key}"]) for key in ("mean", "std"))
    image = ((pixels.float() / 255 - mean) / deviation).permute(2, 0, 1)[None]
    tokens = [token(name, NAMES[name][0])] * SIDE**2
    if name == "gemma3":
        return [token(name, "<start_of_image>"), *tokens, token(name, "<end_of_image>")], image
    # It cuts an image into tiles, here one, and appends the whole.
    around, whole, blank = (token(name, text) for text in ("<fake_token_around_image>", "<global-img>", "\n\n"))
    tile = token(name, "<row_1_col_1>")
    return [around, tile, *tokens, blank, around, whole, *tokens, around], image.expand(2, -1, -1, -1)[None]


def log_probabilities(model, ids, images):
    """Return the logarithms of the probabilities of all tokens after each of a prompt with images."""
    inputs = torch.tensor([ids])
    types = {"token_type_ids": (inputs == FIRST).long()} if images.ndim == 4 else {}
    with torch.no_grad():
        return model(input_ids=inputs, pixel_values=images, **types).logits[0].double().log_softmax(dim=-1)


def greedy(model, ids, images, count):
    """Return the most likely tokens after a prompt with images, and the logarithms of their probabilities."""
    chances = []
    for _ in range(count):
        best = log_probabilities(model, ids, images)[-1].max(dim=0)
        ids = [*ids, int(best.indices)]
        chances.append(float(best.values))
    return ids[-count:], chances
