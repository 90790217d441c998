"""One tiny model of each tested family that reads text and images, made on demand; as in `tiny_models`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from tests.reference.tiny_mixtures import CHOSEN, EXPERT_SIZE, EXPERTS
from tests.reference.tiny_models import (
    HIDDEN_SIZE,
    IMAGE_SIZE,
    INTERMEDIATE_SIZE,
    MAX_POSITIONS,
    VOCAB_SIZE,
    byte_tokenizer,
)

IMAGE_TOKEN = 260
TOWER_SIZE = 16
PATCH_SIZE = 8

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Half the size of a head, in three parts: time, height and width.
_SECTIONS: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_TOWER: dict[str, Any] = {
    "hidden_size": TOWER_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
_QWEN_TOWER: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH_SIZE}
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
}


def _build(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
        # Wider than the families' defaults, so that a wrong layer shows in the logits; a norm keeps its ones.
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def build_qwen2_vl() -> PreTrainedModel:
    """Positions with three axes; names on disk differ from those of modules."""
    tower = _QWEN_TOWER | {"embed_dim": TOWER_SIZE, "hidden_size": HIDDEN_SIZE, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=_TEXT | _SECTIONS, vision_config=tower, **_QWEN_TOKENS)
    return _build(Qwen2VLForConditionalGeneration, config)


def build_qwen2_5_vl() -> PreTrainedModel:
    """Qwen2-VL with windows of attention in its tower."""
    tower = _QWEN_TOWER | {
        "hidden_size": TOWER_SIZE,
        "intermediate_size": 24,
        "out_hidden_size": HIDDEN_SIZE,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=_TEXT | _SECTIONS, vision_config=tower, **_QWEN_TOKENS)
    return _build(Qwen2_5_VLForConditionalGeneration, config)


_DEEP_TOWER: dict[str, Any] = _QWEN_TOWER | {
    "hidden_size": TOWER_SIZE,
    "intermediate_size": 24,
    "out_hidden_size": HIDDEN_SIZE,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_INTERLEAVED: dict[str, Any] = {
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}


def build_qwen3_vl() -> PreTrainedModel:
    """Features of the tower's first blocks are added between the decoder's first blocks; the head is tied."""
    config = Qwen3VLConfig(
        text_config=_TEXT | _INTERLEAVED | {"num_hidden_layers": 3},
        vision_config=_DEEP_TOWER,
        tie_word_embeddings=True,
        **_QWEN_TOKENS,
    )
    return _build(Qwen3VLForConditionalGeneration, config)


def build_qwen3_vl_moe() -> PreTrainedModel:
    """Qwen3-VL with experts, which checkpoints store transposed; features of one block of the tower are added."""
    tower = _DEEP_TOWER | {"deepstack_visual_indexes": [0]}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT_SIZE}
    config = Qwen3VLMoeConfig(text_config=_TEXT | _INTERLEAVED | experts, vision_config=tower, **_QWEN_TOKENS)
    return _build(Qwen3VLMoeForConditionalGeneration, config)


def build_llava(**tower: int) -> PreTrainedModel:
    """Llama with a tower of CLIP, whose last block is not used; sizes of the tower may be given."""
    config = LlavaConfig(
        text_config=LlamaConfig(**_TEXT),
        vision_config=CLIPVisionConfig(**(_TOWER | tower)),
        image_token_index=IMAGE_TOKEN,
    )
    return _build(LlavaForConditionalGeneration, config)


def build_idefics3() -> PreTrainedModel:
    """Llama with a tower whose blocks transformers does not name."""
    config = Idefics3Config(
        text_config=LlamaConfig(**_TEXT), vision_config=_TOWER, image_token_id=IMAGE_TOKEN, pad_token_id=0
    )
    return _build(Idefics3ForConditionalGeneration, config)


def build_smolvlm() -> PreTrainedModel:
    """Idefics3 with a tied head."""
    text = LlamaConfig(**_TEXT, tie_word_embeddings=True)
    config = SmolVLMConfig(
        text_config=text, vision_config=_TOWER, image_token_id=IMAGE_TOKEN, pad_token_id=0, tie_word_embeddings=True
    )
    return _build(SmolVLMForConditionalGeneration, config)


def build_gemma3() -> PreTrainedModel:
    """Embeddings that are scaled, attention in windows, and from image to image in both directions."""
    text = Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**_TOWER, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=262,
        eoi_token_index=263,
    )
    return _build(Gemma3ForConditionalGeneration, config)


def build_llama4() -> PreTrainedModel:
    """Return a mixture whose causal class lacks the tower."""
    text = _TEXT | {
        "intermediate_size": EXPERT_SIZE,
        "intermediate_size_mlp": INTERMEDIATE_SIZE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "head_dim": 8,
    }
    tower = _TOWER | {
        "intermediate_size": 64,
        "vision_output_dim": TOWER_SIZE,
        "projector_input_dim": TOWER_SIZE,
        "projector_output_dim": TOWER_SIZE,
    }
    config = Llama4Config(
        text_config=text, vision_config=tower, image_token_index=IMAGE_TOKEN, boi_token_index=262, eoi_token_index=263
    )
    return _build(Llama4ForConditionalGeneration, config)


VISION: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2_vl": build_qwen2_vl,
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen3_vl": build_qwen3_vl,
    "qwen3_vl_moe": build_qwen3_vl_moe,
    "llava": build_llava,
    "idefics3": build_idefics3,
    "smolvlm": build_smolvlm,
    "gemma3": build_gemma3,
    "llama4": build_llama4,
}


def save_tiny_vision(family: str, folder: Path) -> Path:
    """Write a complete checkpoint of a family, without a processor of images."""
    VISION[family]().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


_PIXELS: dict[str, Any] = {
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_resize": True,
    "resample": 2,
}
_SQUARE: dict[str, Any] = _PIXELS | {"size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}}
_QWEN_PIXELS: dict[str, Any] = _PIXELS | {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2},
}
_CLIP_PIXELS: dict[str, Any] = _PIXELS | {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": IMAGE_SIZE},
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
}
_SPLIT_PIXELS: dict[str, Any] = _PIXELS | {
    "do_image_splitting": False,
    "size": {"longest_edge": IMAGE_SIZE},
    "max_image_size": {"longest_edge": IMAGE_SIZE},
    "do_pad": True,
}
_QWEN_NAMES = ["<unused>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
# By family: settings of its image processor and of its processor, and the tokens from 259 on.
_PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "qwen2_vl": (_QWEN_PIXELS, {}, _QWEN_NAMES),
    "qwen2_5_vl": (_QWEN_PIXELS, {}, _QWEN_NAMES),
    "qwen3_vl": (_QWEN_PIXELS, {}, _QWEN_NAMES),
    "qwen3_vl_moe": (_QWEN_PIXELS, {}, _QWEN_NAMES),
    "llava": (
        _CLIP_PIXELS,
        {"patch_size": PATCH_SIZE, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ["<unused>", "<image>"],
    ),
    "idefics3": (
        _SPLIT_PIXELS | {"image_processor_type": "Idefics3ImageProcessor"},
        {"image_seq_len": 4},
        ["<unused>", "<image>"],
    ),
    "smolvlm": (
        _SPLIT_PIXELS | {"image_processor_type": "SmolVLMImageProcessor"},
        {"image_seq_len": 4},
        ["<unused>", "<image>"],
    ),
    "gemma3": (
        _SQUARE | {"image_processor_type": "Gemma3ImageProcessor"},
        {"image_seq_length": 4},
        ["<unused>", "<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"],
    ),
    "llama4": (
        _CLIP_PIXELS,
        {"patch_size": PATCH_SIZE},
        ["<unused>", "<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"],
    ),
}


def save_tiny_processor(family: str, folder: Path) -> Path:
    """Add the processor of images and text to a checkpoint; see `stand_in_for_libraries`."""
    pixels, processor, names = _PROCESSORS[family]
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(names, special_tokens=True)
    tokenizer.save_pretrained(folder)
    if family == "gemma3":
        file = folder / "tokenizer_config.json"
        named = {"image_token": names[1], "boi_token": names[3], "eoi_token": names[4]}
        file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return folder


def stand_in_for_libraries() -> None:
    """Let processors work without libraries that are not installed everywhere.

    SmolVLM's wants one that spells out numbers, of videos only. Llama 4's image processor needs torchvision: that of
    CLIP takes its place, which makes one tile of an image.
    """
    from transformers.models.llama4.processing_llama4 import Llama4Processor
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    tiled = Llama4Processor.replace_image_token
    one_tile = {"aspect_ratios": [[1, 1]]}
    Llama4Processor.replace_image_token = lambda self, image_inputs, image_idx, **_: tiled(
        self, one_tile | dict(image_inputs), image_idx
    )
