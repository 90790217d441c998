"""Settings of a model out of the metadata of its GGUF file: the reverse of `gguf_families`. Loads no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.exports.gguf_families import FAMILIES, Family

_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Those that not every file has. llama.cpp's values of the others are those of transformers.
_OPTIONAL = ("vocab_size", "attn_logit_softcapping", "final_logit_softcapping")
# Its checkpoints have experts in another layout, and the original has fewer bits than most files.
_LEFT_OUT = "gpt-oss"
_SPECIAL = {"bos": "bos", "eos": "eos", "padding": "pad"}
# Bounds of the wavelengths that Llama 3.1 and later scale by a part, in trained ranges; files have only the result.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def class_of(metadata: Mapping[str, Any]) -> str:
    """Return the class of a model.

    Args:
        metadata: the metadata of its file.

    Raises:
        UnsupportedArchitectureError: files of this architecture are not read.
    """
    arch = metadata.get("general.architecture")
    mixes = f"{arch}.expert_count" in metadata
    for name, family in FAMILIES.items():
        if family.arch == arch != _LEFT_OUT and (family.mixture is not None) == mixes:
            return name
    known = ", ".join(sorted({family.arch for family in FAMILIES.values()} - {_LEFT_OUT}))
    raise UnsupportedArchitectureError(
        f"GGUF files of the architecture {arch}{' with experts' if mixes else ''} are not read; those of {known} are. "
        "Give the original transformers checkpoint"
    )


def settings_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return the settings of a model, as arguments of the configuration of its class.

    Args:
        metadata: the metadata of its file.
        tensors: shapes of its tensors, by their names in the file.
        factors: divisors of the frequencies of rotations, by the names of their tensors.

    Raises:
        KeyError: the metadata lack a setting.
    """
    name = class_of(metadata)
    family = FAMILIES[name]
    found = {
        key.removeprefix(f"{family.arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{family.arch}.")
    }
    settings = {setting: found[key] for key, setting in _SETTINGS.items()}
    settings |= {key: found[key] for key in _OPTIONAL if key in found}
    settings |= {f"{kind}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for key, kind in _SPECIAL.items()}
    settings.setdefault("vocab_size", tensors["token_embd.weight"][0])
    width = settings["hidden_size"] // settings["num_attention_heads"]
    head = found.get(
        "attention.key_length", width if family.arch == "phi3" else found.get("rope.dimension_count", width)
    )
    settings |= {
        "head_dim": head,
        "num_key_value_heads": found.get("attention.head_count_kv", settings["num_attention_heads"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": found.get("attention.sliding_window") if family.layer_pattern else None,
        "rope_parameters": _rotations(found, family, head, factors),
    }
    if family.layer_pattern and family.mixture is None:
        settings["query_pre_attn_scalar"] = width if family.is_largest(settings["num_hidden_layers"]) else head
    if family.mixture is not None:
        count = "num_local_experts" if name == "MixtralForCausalLM" else "num_experts"
        settings |= {setting: found[key] for key, setting in family.mixture.sizes.items()}
        settings |= {count: found["expert_count"], "num_experts_per_tok": found["expert_used_count"]}
        settings["norm_topk_prob"] = family.mixture.normalized
    return settings


def _rotations(
    found: Mapping[str, Any], family: Family, head: int, factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return the settings of rotations, in the form of transformers 5."""
    theta = float(found.get("rope.freq_base", 10000.0))
    trained = found.get("rope.scaling.original_context_length", found["context_length"])
    rope: dict[str, Any] = {"rope_type": found.get("rope.scaling.type", "default"), "rope_theta": theta}
    part = found.get("rope.dimension_count", head) / head
    if part != 1:
        rope["partial_rotary_factor"] = part
    if rope["rope_type"] == "none":
        rope["rope_type"] = "default"
    if "rope_freqs.weight" in factors:
        rope |= _llama3(factors["rope_freqs.weight"], theta)
    elif "rope_factors_long.weight" in factors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": list(factors["rope_factors_long.weight"]),
            "short_factor": list(factors["rope_factors_short.weight"]),
            "original_max_position_embeddings": trained,
            "attention_factor": found["rope.scaling.attn_factor"],
        }
    elif rope["rope_type"] != "default":
        rope["factor"] = found["rope.scaling.factor"]
    if rope["rope_type"] == "yarn":
        rope |= {
            "original_max_position_embeddings": trained,
            "beta_fast": found.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": found.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    if family.arch != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": float(found.get("rope.freq_base_swa", 10000.0))}
    return {"full_attention": rope, "sliding_attention": local}


def _llama3(factors: Sequence[float], theta: float) -> dict[str, Any]:
    """Return the settings that `rope_factors` computes such divisors from, if there are any."""
    factor, (low, high) = max(factors), _LLAMA3.values()
    trained = 0.0
    for place, divisor in enumerate(factors):
        if 1 < divisor < factor:
            smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
            wavelength = 2 * math.pi * theta ** (place / len(factors))
            trained = (smooth * (high - low) + low) * wavelength
            break
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": round(trained),
        **_LLAMA3,
    }
