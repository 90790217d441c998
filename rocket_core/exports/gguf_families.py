"""Families of models that llama.cpp runs: names of tensors, and metadata from a model's settings. Loads no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rocket_core.errors import UnsupportedExportError
from rocket_core.exports.gguf_file import GgufValue
from rocket_core.exports.gguf_mixtures import (
    GPT_OSS_MODULES,
    MIXTRAL_MODULES,
    MIXTURE_MODULES,
    SHARED_EXPERT_MODULES,
    Mixture,
    mixture_metadata,
    unsupported_mixture,
)

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu")
# Upper bounds, far above those of any model, so that absurd settings take no memory.
_MOST = {"num_hidden_layers": 4096, "vocab_size": 2**22, "hidden_size": 2**20, "num_attention_heads": 2**16}
# Blocks of the largest model of a family.
_LARGEST = {"gemma2": 46, "gemma3": 62}
# Modules of a block, by their names in transformers and in llama.cpp.
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_FUSED = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        arch: its name in llama.cpp.
        modules: names of a block's modules.
        activations: names of the activation function that llama.cpp computes.
        interleaved: whether llama.cpp rotates neighbouring pairs of a head's queries and keys, not halves.
        shifted_norms: whether transformers adds 1 to the weights of norms.
        tied: whether the head is the token embedding unless the settings say otherwise.
        biased: whether linear layers may have biases.
        ropes: ways to extend the range of positions, other than the common ones.
        layer_pattern: every so many layers one attends to all tokens, the others to a window; 0 if all attend to all.
        untied: whether the head must not be the token embedding.
        full_heads: whether the heads of queries must be as wide as the states together.
        equal_heads: whether there must be as many heads of keys as of queries.
        mixture: its experts; None if it has none.
        rounds_yarn: whether llama.cpp rounds the ends of the range of YaRN though the settings do not, in its own files
            as well.
    """

    arch: str
    modules: Mapping[str, str]
    activations: tuple[str, ...] = _SILU
    interleaved: bool = False
    shifted_norms: bool = False
    tied: bool = False
    biased: bool = False
    ropes: tuple[str, ...] = ()
    layer_pattern: int = 0
    untied: bool = False
    full_heads: bool = False
    equal_heads: bool = False
    mixture: Mixture | None = None
    rounds_yarn: bool = False

    def is_largest(self, layers: int) -> bool:
        """Return whether a model of so many layers is its family's largest, which has another scale of attention."""
        return layers == _LARGEST.get(self.arch)


_LLAMA = Family(arch="llama", modules=_ATTENTION | _NORMS | _MLP, interleaved=True, biased=True, ropes=("llama3",))


def _gemma(arch: str, modules: dict[str, str], layer_pattern: int = 0) -> Family:
    return Family(
        arch=arch,
        modules=_ATTENTION | modules | _MLP,
        activations=_GELU,
        shifted_norms=True,
        tied=True,
        layer_pattern=layer_pattern,
    )


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": Family(
        arch="llama",
        modules=_ATTENTION | _NORMS | MIXTRAL_MODULES,
        interleaved=True,
        mixture=Mixture(sizes={}, normalized=True),
    ),
    "Qwen2ForCausalLM": Family(arch="qwen2", modules=_ATTENTION | _NORMS | _MLP, biased=True),
    "Qwen2MoeForCausalLM": Family(
        arch="qwen2moe",
        modules=_ATTENTION | _NORMS | MIXTURE_MODULES | SHARED_EXPERT_MODULES,
        biased=True,
        untied=True,
        full_heads=True,
        mixture=Mixture(
            sizes={
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            normalized=False,
        ),
    ),
    "Qwen3ForCausalLM": Family(arch="qwen3", modules=_ATTENTION | _HEAD_NORMS | _NORMS | _MLP),
    "Qwen3MoeForCausalLM": Family(
        arch="qwen3moe",
        modules=_ATTENTION | _HEAD_NORMS | _NORMS | MIXTURE_MODULES,
        mixture=Mixture(sizes={"expert_feed_forward_length": "moe_intermediate_size"}, normalized=True),
    ),
    "OlmoeForCausalLM": Family(
        arch="olmoe",
        modules=_ATTENTION | _HEAD_NORMS | _NORMS | MIXTURE_MODULES,
        untied=True,
        full_heads=True,
        equal_heads=True,
        mixture=Mixture(sizes={}, normalized=False),
    ),
    "GptOssForCausalLM": Family(
        arch="gpt-oss",
        modules=_ATTENTION | {"post_attention_layernorm": "post_attention_norm"} | GPT_OSS_MODULES,
        biased=True,
        layer_pattern=2,
        untied=True,
        mixture=Mixture(sizes={"expert_feed_forward_length": "intermediate_size"}, normalized=True),
        rounds_yarn=True,
    ),
    "GemmaForCausalLM": _gemma("gemma", _NORMS),
    "Gemma2ForCausalLM": _gemma("gemma2", _FOUR_NORMS, 2),
    "Gemma3ForCausalLM": _gemma("gemma3", _HEAD_NORMS | _FOUR_NORMS, 6),
    "Phi3ForCausalLM": Family(arch="phi3", modules=_FUSED, ropes=("longrope",)),
}
"""Families by the architecture that a model's settings name."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a model.

    Args:
        config: the model's settings.

    Raises:
        UnsupportedExportError: it is not one of those that can be written.
    """
    named = (config.get("architectures") or [None])[0]
    family = FAMILIES.get(str(named))
    if family is None:
        raise UnsupportedExportError(
            f"{named} cannot be written for llama.cpp; the architectures that can are {', '.join(FAMILIES)}"
        )
    _check(config, family)
    return family


def is_tied(config: Mapping[str, Any], family: Family) -> bool:
    """Return whether the head is the token embedding."""
    return bool(config.get("tie_word_embeddings", family.tied))


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def key_heads(config: Mapping[str, Any]) -> int:
    """Return the heads of keys and values."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def family_metadata(config: Mapping[str, Any], family: Family) -> dict[str, GgufValue]:
    """Return the metadata that follow from a model's settings.

    Args:
        config: the model's settings.
        family: its family.

    Raises:
        UnsupportedExportError: llama.cpp cannot compute what the settings ask for.
    """
    metadata = {
        "vocab_size": _whole(config["vocab_size"]),
        "context_length": _whole(_context(config, family)),
        "embedding_length": _whole(config["hidden_size"]),
        "block_count": _whole(config["num_hidden_layers"]),
        "feed_forward_length": _whole(config["intermediate_size"]),
        "attention.head_count": _whole(config["num_attention_heads"]),
        "attention.head_count_kv": _whole(key_heads(config)),
        "attention.key_length": _whole(head_dim(config)),
        "attention.value_length": _whole(head_dim(config)),
        "attention.layer_norm_rms_epsilon": _real(config.get("rms_norm_eps", 1e-6)),
        **_rope_metadata(config, family),
        **(mixture_metadata(config, family.mixture) if family.mixture else {}),
    }
    if family.layer_pattern:
        metadata["attention.sliding_window"] = _whole(config["sliding_window"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) and family.layer_pattern:
            metadata[key] = _real(config[key])
    return {f"{family.arch}.{key}": value for key, value in metadata.items()}


def rope_factors(config: Mapping[str, Any], family: Family) -> dict[str, tuple[float, ...]]:
    """Return tensors that follow from a model's settings: divisors of the frequencies of rotations, by name."""
    rope = _rope(config)
    if _rope_type(rope) == "longrope" and "longrope" in family.ropes:
        return {
            f"rope_factors_{length}.weight": tuple(map(float, rope[f"{length}_factor"])) for length in ("long", "short")
        }
    if _rope_type(rope) != "llama3":
        return {}
    dimensions = head_dim(config)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = float(rope["original_max_position_embeddings"])
    factors = []
    for place in range(0, dimensions, 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (place / dimensions)
        smooth = min(max((trained / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / float(rope["factor"]) + smooth))
    return {"rope_freqs.weight": tuple(factors)}


def _whole(value: Any) -> GgufValue:
    return GgufValue("uint32", int(value))


def _real(value: Any) -> GgufValue:
    return GgufValue("float32", float(value))


def _refuse(what: str) -> UnsupportedExportError:
    return UnsupportedExportError(f"The model cannot be written for llama.cpp: it has {what}")


def _check(config: Mapping[str, Any], family: Family) -> None:
    """Raise an error for settings that change what a family computes in a way that llama.cpp does not know."""
    for key, most in _MOST.items():
        if not 0 < int(config[key]) <= most:
            raise _refuse(f"{key} {config[key]}")
    if not 0 < head_dim(config) <= _MOST["hidden_size"]:
        raise _refuse(f"heads of size {head_dim(config)}")
    activation = config.get("hidden_activation") or config.get("hidden_act") or family.activations[0]
    if activation not in family.activations:
        raise _refuse(f"the activation function {activation}, and llama.cpp computes {family.activations[0]}")
    if config.get("quantization_config"):
        raise _refuse("quantized weights")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and not family.biased:
            raise _refuse(f"biases ({key}), which {family.arch} has no place for")
    if family.tied and not is_tied(config, family):
        raise _refuse(f"a head that is not the token embedding, which {family.arch} has no place for")
    if family.untied and is_tied(config, family):
        raise _refuse(f"a head that is the token embedding, and {family.arch} needs a separate one")
    if config.get("partial_rotary_factor", 1.0) != 1.0 and family.arch != "phi3":
        raise _refuse("rotations of a part of each head")
    _check_heads(config, family)
    _check_windows(config, family)
    unsupported = None if family.mixture is None else unsupported_mixture(config, family.mixture)
    if unsupported is not None:
        raise _refuse(unsupported)


def _check_heads(config: Mapping[str, Any], family: Family) -> None:
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    if family.full_heads and heads * head_dim(config) != width:
        raise _refuse(f"{heads} heads of size {head_dim(config)}, and {family.arch} needs {width} together")
    if family.equal_heads and key_heads(config) != heads:
        raise _refuse(f"{key_heads(config)} heads of keys, and {family.arch} has as many as of queries, {heads}")


def _check_windows(config: Mapping[str, Any], family: Family) -> None:
    pattern, layers = family.layer_pattern, int(config["num_hidden_layers"])
    if not pattern:
        return
    types = config.get("layer_types")
    expected = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
    if (types is not None and types != expected) or config.get("sliding_window_pattern", pattern) != pattern:
        raise _refuse(f"windows of attention in other layers than {family.arch} has them")
    if family.mixture is not None:
        return
    if config.get("use_bidirectional_attention"):
        raise _refuse("attention in both directions")
    largest = family.is_largest(layers)
    scale = config["hidden_size"] // config["num_attention_heads"] if largest else head_dim(config)
    if config.get("query_pre_attn_scalar", 256) != scale:
        raise _refuse(f"the attention scale {config.get('query_pre_attn_scalar', 256)}, and llama.cpp takes {scale}")
    if family.arch == "gemma3" and config.get("attn_logit_softcapping"):
        raise _refuse("soft-capped attention")


def _context(config: Mapping[str, Any], family: Family) -> int:
    """Return the longest text; a window of attention that llama.cpp does not apply is an upper bound."""
    longest = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    if family.layer_pattern or not window or config.get("use_sliding_window") is False:
        return longest
    return min(longest, int(window))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotations, of layers that attend to all tokens, in the form of transformers 5."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    return rope


def _rope_type(rope: Mapping[str, Any]) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return "longrope" if kind == "su" else kind


def _local_theta(config: Mapping[str, Any]) -> float:
    """Return the base of rotations in layers with windows."""
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return float(local.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0)


def _rope_metadata(config: Mapping[str, Any], family: Family) -> dict[str, GgufValue]:
    rope = _rope(config) | ({"truncate": True} if family.rounds_yarn else {})
    dimensions = int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    metadata = {"rope.freq_base": _real(rope["rope_theta"]), "rope.dimension_count": _whole(dimensions)}
    if family.arch == "gemma3":
        metadata["rope.freq_base_swa"] = _real(_local_theta(config))
    kind = _rope_type(rope)
    if kind == "default" or (kind == "llama3" and kind in family.ropes):
        return metadata
    scaling = _SCALINGS.get(kind)
    if scaling is None or (kind == "longrope" and kind not in family.ropes):
        raise _refuse(f"rotations of the type {kind}, which {family.arch} does not have")
    return metadata | {f"rope.scaling.{key}": value for key, value in scaling(rope, config).items()}


def _linear(rope: Mapping[str, Any], _config: Mapping[str, Any]) -> dict[str, GgufValue]:
    return {"type": GgufValue("string", "linear"), "factor": _real(rope["factor"])}


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, GgufValue]:
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key):
            raise _refuse(f"rotations of the type yarn with {key}")
    if rope.get("truncate") is False:
        raise _refuse("rotations of the type yarn without truncation")
    trained = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        "type": GgufValue("string", "yarn"),
        "factor": _real(rope["factor"]),
        "original_context_length": _whole(trained),
        "yarn_beta_fast": _real(rope.get("beta_fast") or 32),
        "yarn_beta_slow": _real(rope.get("beta_slow") or 1),
    }


def _longrope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, GgufValue]:
    trained = int(rope["original_max_position_embeddings"])
    factor = rope.get("factor") or config["max_position_embeddings"] / trained
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return {
        "type": GgufValue("string", "longrope"),
        "original_context_length": _whole(trained),
        "attn_factor": _real(attention),
    }


_SCALINGS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, GgufValue]]] = {
    "linear": _linear,
    "yarn": _yarn,
    "longrope": _longrope,
}
