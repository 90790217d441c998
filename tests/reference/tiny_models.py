"""One tiny model of each tested family, and complete checkpoints of them, made on the spot.

Every model is seeded, float32 and in eval mode: hidden size 32, 2 blocks of attention and MLP, 64 positions. Weights
are drawn wider than the families' defaults, so that a wrong layer shows in the logits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 80
MAX_POSITIONS = 64
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


def build_opt() -> PreTrainedModel:
    """Linear layers with biases, learned positions, tied head."""
    config = OPTConfig(**_COMMON, ffn_dim=INTERMEDIATE_SIZE, word_embed_proj_dim=HIDDEN_SIZE, init_std=0.2)
    return _build(OPTForCausalLM, config)


def build_gpt_neox() -> PreTrainedModel:
    """Fused q/k/v with biases, attention and MLP in parallel."""
    config = GPTNeoXConfig(**_COMMON, intermediate_size=INTERMEDIATE_SIZE, initializer_range=0.2)
    return _build(GPTNeoXForCausalLM, config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": build_llama,
    "qwen3": build_qwen3,
    "mistral": build_mistral,
    "gemma": build_gemma,
    "phi3": build_phi3,
    "gpt2": build_gpt2,
    "opt": build_opt,
    "gpt_neox": build_gpt_neox,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after `<pad>`, `<s>` and `</s>`; adds no special token by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **SPECIAL_TOKENS)


def save_tiny_model(family: str, folder: Path) -> Path:
    """Write a complete checkpoint of `family` (see `FAMILIES`) into `folder`: model, configs, tokenizer."""
    FAMILIES[family]().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
