"""Mixtures of experts that llama.cpp runs: names of their tensors, metadata, and what it computes. Loads no torch.

References:
    llama.cpp, `src/models/llama.cpp`, `qwen2moe.cpp`, `qwen3moe.cpp`, `olmoe.cpp` and `openai-moe.cpp` (tensors,
    weights of the chosen experts), `src/llama-graph.cpp` (`build_moe_ffn`) and `conversion/` (metadata).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocket_core.exports.gguf_file import GgufValue

ROUTERS = frozenset({"ffn_gate_inp", "ffn_gate_inp_shexp"})
"""Modules that choose or weigh experts, by their names in llama.cpp; stored as F32."""

SINKS = "self_attn.sinks"
"""A parameter of a block, without the suffix that those of modules have."""

MIXTURE_MODULES: dict[str, str] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
"""Modules of a mixture's block; those of experts without the expert's number."""

MIXTRAL_MODULES: dict[str, str] = {
    **MIXTURE_MODULES,
    # Its checkpoints name them in another way than transformers.
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}

GPT_OSS_MODULES: dict[str, str] = {
    **MIXTURE_MODULES,
    "mlp.router": "ffn_gate_inp",
    SINKS: "attn_sinks",
}

SHARED_EXPERT_MODULES: dict[str, str] = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
"""Modules of an expert that reads all tokens."""

_MOST_EXPERTS = 1024
# What llama.cpp computes between the layers of gpt-oss's experts; no other family has such settings.
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What llama.cpp knows of a family's experts.

    Attributes:
        sizes: metadata with sizes of experts, and the settings that have them.
        normalized: whether the weights of the experts chosen for a token are scaled to a sum of 1.
    """

    sizes: Mapping[str, str]
    normalized: bool


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of a block's experts."""
    return int(config["num_experts"] if config.get("num_local_experts") is None else config["num_local_experts"])


def mixture_metadata(config: Mapping[str, Any], mixture: Mixture) -> dict[str, GgufValue]:
    """Return the metadata of a model's experts."""
    sizes = {key: config[setting] for key, setting in mixture.sizes.items()}
    counts = {"expert_count": expert_count(config), "expert_used_count": config["num_experts_per_tok"]}
    return {key: GgufValue("uint32", int(value)) for key, value in (counts | sizes).items()}


def unsupported_mixture(config: Mapping[str, Any], mixture: Mixture) -> str | None:
    """Return what llama.cpp does not compute of a model's experts; None if it computes them as the settings ask for."""
    experts, chosen = expert_count(config), int(config["num_experts_per_tok"])
    if not 0 < chosen <= experts <= _MOST_EXPERTS:
        return f"{chosen} of {experts} experts for each token"
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step", 1)) != 1:
        return "blocks without experts (mlp_only_layers, decoder_sparse_step)"
    if bool(config.get("norm_topk_prob", mixture.normalized)) != mixture.normalized:
        computed = "scales their weights to a sum of 1" if mixture.normalized else "takes their weights as they are"
        return f"norm_topk_prob {not mixture.normalized}, and llama.cpp {computed}"
    if any(config.get(key, value) != value for key, value in _SWIGLU.items()):
        return f"other activations of experts than with {_SWIGLU}"
    if config.get("clip_qkv") is not None:
        return "clipped queries, keys and values (clip_qkv)"
    return None
