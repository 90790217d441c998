"""One tiny model of each tested family, and complete checkpoints of them, made on demand.

Every model is seeded, float32 and in eval mode: hidden size 32, 2 blocks of attention and MLP, 64 positions. Weights
are drawn wider than the families' defaults, so that a wrong layer shows in the logits.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

VOCAB_SIZE = 320
HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 80
MAX_POSITIONS = 64
IMAGE_SIZE = 32
MEL_BINS = 16
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}

_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON: dict[str, Any] = {
    **_SPECIAL_IDS,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
_LLAMA_LIKE: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def _build(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)  # zero as initialised, and a lost bias would go unseen
    return model.eval()


def build_llama() -> PreTrainedModel:
    """Grouped-query attention, SwiGLU, untied head."""
    return _build(LlamaForCausalLM, LlamaConfig(**_LLAMA_LIKE))


def build_qwen3() -> PreTrainedModel:
    """Llama with normalised queries and keys, and a head size that is not hidden size / heads."""
    return _build(Qwen3ForCausalLM, Qwen3Config(**_LLAMA_LIKE, head_dim=16))


def build_mistral() -> PreTrainedModel:
    """Llama with sliding-window attention."""
    return _build(MistralForCausalLM, MistralConfig(**_LLAMA_LIKE, sliding_window=16))


def build_gemma() -> PreTrainedModel:
    """Llama with GeGLU and a tied head."""
    return _build(GemmaForCausalLM, GemmaConfig(**_LLAMA_LIKE, head_dim=8))


def build_phi3() -> PreTrainedModel:
    """Fused q/k/v and fused gate/up projections."""
    config = Phi3Config(**_LLAMA_LIKE, original_max_position_embeddings=MAX_POSITIONS)
    return _build(Phi3ForCausalLM, config)


def build_gpt2() -> PreTrainedModel:
    """Transposed layers (`Conv1D`) with biases, learned positions, tied head."""
    return _build(GPT2LMHeadModel, GPT2Config(**_COMMON, n_inner=INTERMEDIATE_SIZE, initializer_range=0.2))


def build_openai_gpt() -> PreTrainedModel:
    """Return a model whose blocks return lists."""
    sizes = {"n_positions": MAX_POSITIONS, "n_embd": HIDDEN_SIZE, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    return _build(OpenAIGPTLMHeadModel, OpenAIGPTConfig(vocab_size=VOCAB_SIZE, **sizes))


def build_opt() -> PreTrainedModel:
    """Linear layers with biases, learned positions, tied head."""
    config = OPTConfig(**_COMMON, ffn_dim=INTERMEDIATE_SIZE, word_embed_proj_dim=HIDDEN_SIZE, init_std=0.2)
    return _build(OPTForCausalLM, config)


def build_gpt_neox() -> PreTrainedModel:
    """Fused q/k/v with biases, attention and MLP in parallel."""
    config = GPTNeoXConfig(**_COMMON, intermediate_size=INTERMEDIATE_SIZE, initializer_range=0.2)
    return _build(GPTNeoXForCausalLM, config)


def build_bert() -> PreTrainedModel:
    """Return an encoder as sentence-transformers stores it: without a head, its files without a prefix."""
    return _build(BertModel, BertConfig(**_COMMON, intermediate_size=INTERMEDIATE_SIZE, initializer_range=0.2))


def build_roberta() -> PreTrainedModel:
    """Return an encoder with a tied head, whose positions start after the padding token's id."""
    sizes = _COMMON | {"max_position_embeddings": MAX_POSITIONS + 1}
    return _build(
        RobertaForMaskedLM, RobertaConfig(**sizes, intermediate_size=INTERMEDIATE_SIZE, initializer_range=0.2)
    )


def build_mistral_embedding() -> PreTrainedModel:
    """Return a decoder without a head, as embedding models are."""
    return _build(MistralModel, MistralConfig(**_LLAMA_LIKE, sliding_window=16))


def build_qwen3_tagger() -> PreTrainedModel:
    """Return a decoder with a head that classifies tokens."""
    return _build(Qwen3ForTokenClassification, Qwen3Config(**_LLAMA_LIKE, head_dim=16, num_labels=3))


def build_llama_reward() -> PreTrainedModel:
    """Return a decoder that scores a text by its last token, as reward models do."""
    return _build(LlamaForSequenceClassification, LlamaConfig(**_LLAMA_LIKE, num_labels=1))


def build_distilbert() -> PreTrainedModel:
    """Return an encoder whose blocks transformers does not name."""
    config = DistilBertConfig(
        **_SPECIAL_IDS,
        vocab_size=VOCAB_SIZE,
        dim=HIDDEN_SIZE,
        hidden_dim=INTERMEDIATE_SIZE,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
    )
    return _build(DistilBertForMaskedLM, config)


_VISION: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}


def build_vit() -> PreTrainedModel:
    """Images, a class token, module names other than those on disk."""
    return _build(ViTForImageClassification, ViTConfig(**_VISION, initializer_range=0.2))


def build_siglip_vision() -> PreTrainedModel:
    """Return an encoder of images with attention pooling after the blocks."""
    return _build(SiglipVisionModel, SiglipVisionConfig(**_VISION))


def build_t5() -> PreTrainedModel:
    """Return an encoder-decoder whose first blocks pass a position bias to all others; gated MLP."""
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=HIDDEN_SIZE,
        d_kv=8,
        d_ff=INTERMEDIATE_SIZE,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        n_positions=MAX_POSITIONS,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    return _build(T5ForConditionalGeneration, config)


def build_whisper() -> PreTrainedModel:
    """Return an encoder-decoder that hears one second of audio and reads text."""
    config = WhisperConfig(
        **_SPECIAL_IDS,
        vocab_size=VOCAB_SIZE,
        d_model=HIDDEN_SIZE,
        num_mel_bins=MEL_BINS,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=INTERMEDIATE_SIZE,
        decoder_ffn_dim=INTERMEDIATE_SIZE,
        max_source_positions=50,
        max_target_positions=MAX_POSITIONS,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        init_std=0.2,
    )
    return _build(WhisperForConditionalGeneration, config)


def build_falcon() -> PreTrainedModel:
    """Linear layers of a class of the family, fused q/k/v with one key and value, parallel residual, tied head."""
    return _build(FalconForCausalLM, FalconConfig(**_COMMON, initializer_range=0.2))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": build_llama,
    "qwen3": build_qwen3,
    "mistral": build_mistral,
    "gemma": build_gemma,
    "phi3": build_phi3,
    "gpt2": build_gpt2,
    "openai_gpt": build_openai_gpt,
    "opt": build_opt,
    "gpt_neox": build_gpt_neox,
    "falcon": build_falcon,
}


OTHER_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": build_bert,
    "roberta": build_roberta,
    "distilbert": build_distilbert,
    "vit": build_vit,
    "siglip_vision": build_siglip_vision,
    "mistral_embedding": build_mistral_embedding,
    "qwen3_tagger": build_qwen3_tagger,
    "llama_reward": build_llama_reward,
    "t5": build_t5,
    "whisper": build_whisper,
}
"""Families other than decoders that predict tokens."""

ALL_FAMILIES = FAMILIES | OTHER_FAMILIES

# What the tokenizer of a family puts around a text.
_TEMPLATES = {
    "bert": "<s> $A </s>",
    "roberta": "<s> $A </s>",
    "distilbert": "<s> $A </s>",
    "t5": "$A </s>",
    "whisper": "<s> $A </s>",
}


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, after `<pad>`, `<s>` and `</s>`; adds no special token but those of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if template is not None:
        special = [(token, vocabulary[token]) for token in SPECIAL_TOKENS.values()]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **SPECIAL_TOKENS)


def save_tiny_model(family: str, folder: Path) -> Path:
    """Write a complete checkpoint of `family` (see `ALL_FAMILIES`): model, configs, tokenizer or processor."""
    model = ALL_FAMILIES[family]()
    model.save_pretrained(folder)
    if model.main_input_name == "pixel_values":
        # As saved by the processor of either family, which needs an image library.
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
            "do_normalize": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "resample": 2,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return folder
    byte_tokenizer(_TEMPLATES.get(family)).save_pretrained(folder)
    if model.main_input_name == "input_features":
        WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1).save_pretrained(folder)
    return folder


def tiny_inputs(model: PreTrainedModel, samples: int = 4, length: int = 20, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the arguments of a tiny model by name."""
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> torch.Tensor:
        return torch.randint(3, 259, (samples, length), generator=generator)

    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(samples, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)}
    if model.main_input_name == "input_features":
        return {
            "input_features": torch.randn(samples, MEL_BINS, 100, generator=generator),
            "decoder_input_ids": tokens(),
        }
    pair = {"decoder_input_ids": tokens()} if model.config.is_encoder_decoder else {}
    return {"input_ids": tokens(), **pair}
