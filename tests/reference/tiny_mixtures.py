"""One tiny model of each tested family of mixtures of experts, made on demand; as in `tiny_models`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.reference.tiny_models import HIDDEN_SIZE, MAX_POSITIONS, VOCAB_SIZE, byte_tokenizer

EXPERTS = 4
CHOSEN = 2
EXPERT_SIZE = 24

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": CHOSEN,
}
_QWEN: dict[str, Any] = _SIZES | {
    "num_experts": EXPERTS,
    "moe_intermediate_size": EXPERT_SIZE,
    "intermediate_size": 48,
    "norm_topk_prob": True,
}
_LOCAL: dict[str, Any] = _SIZES | {"num_local_experts": EXPERTS, "intermediate_size": EXPERT_SIZE}
_SHARED: dict[str, Any] = _SIZES | {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": EXPERT_SIZE,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = _SHARED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DBRX: dict[str, Any] = {
    name: _SIZES[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
} | {
    "d_model": HIDDEN_SIZE,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": MAX_POSITIONS,
    "initializer_range": 0.2,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    "ffn_config": {
        "hidden_size": HIDDEN_SIZE,
        "ffn_hidden_size": EXPERT_SIZE,
        "moe_num_experts": EXPERTS,
        "moe_top_k": CHOSEN,
    },
}


def _build(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            # Zero, or not at all, as initialised: a lost bias would go unseen, and routers would choose the same.
            if name.endswith("bias") or parameter.ndim == 3 or ".experts." in name:
                torch.nn.init.normal_(parameter, std=0.2)
            elif name.endswith(("gate.weight", "router.weight", "router.layer.weight")):
                torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: _build(MixtralForCausalLM, MixtralConfig(**_LOCAL)),
    "qwen2_moe": lambda: _build(
        Qwen2MoeForCausalLM, Qwen2MoeConfig(**_QWEN, shared_expert_intermediate_size=40, decoder_sparse_step=1)
    ),
    "qwen3_moe": lambda: _build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_QWEN, head_dim=16, decoder_sparse_step=1)),
    "olmoe": lambda: _build(OlmoeForCausalLM, OlmoeConfig(**(_QWEN | {"intermediate_size": EXPERT_SIZE}))),
    "deepseek_v2": lambda: _build(DeepseekV2ForCausalLM, DeepseekV2Config(**_LATENT, topk_method="greedy")),
    "deepseek_v3": lambda: _build(DeepseekV3ForCausalLM, DeepseekV3Config(**_LATENT, norm_topk_prob=True)),
    "gpt_oss": lambda: _build(GptOssForCausalLM, GptOssConfig(**_LOCAL, head_dim=8, sliding_window=16)),
    "glm4_moe": lambda: _build(Glm4MoeForCausalLM, Glm4MoeConfig(**_SHARED, head_dim=8, norm_topk_prob=True)),
    "granitemoe": lambda: _build(GraniteMoeForCausalLM, GraniteMoeConfig(**_LOCAL)),
    "phimoe": lambda: _build(PhimoeForCausalLM, PhimoeConfig(**_LOCAL)),
    "dbrx": lambda: _build(DbrxForCausalLM, DbrxConfig(**_DBRX)),
    "llama4": lambda: _build(
        Llama4ForCausalLM,
        Llama4TextConfig(
            **_LOCAL,
            head_dim=8,
            intermediate_size_mlp=40,
            interleave_moe_layer_step=1,
            attention_chunk_size=32,
        ),
    ),
}
"""Decoders with experts: those of gpt-oss and Llama 4 are stored transposed, those of gpt-oss with biases and gate and
up interleaved; the tiny DeepSeek and GLM models have a first block without experts.
"""


def inputs(samples: int = 4, length: int = 20) -> torch.Tensor:
    """Return token ids."""
    return torch.randint(3, 259, (samples, length), generator=torch.Generator().manual_seed(1))


def save_tiny_mixture(family: str, folder: Path) -> Path:
    """Write a complete checkpoint of a family of `MIXTURES`: model, configs, tokenizer."""
    MIXTURES[family]().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
