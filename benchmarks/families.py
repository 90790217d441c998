"""Fractions of models that are compressed, by family: `python -m benchmarks.families [--page PAGE] [--family NAME]`.

Prints the rows of the tables in `docs/how-to/mixtures.md`, `vision.md` and `speech.md`. Models are built on the meta
device from the shapes of a release, so that neither weights nor memory are needed; large mixtures take a minute.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from rocket_core.experts import is_expert_name, unfused_modules
from rocket_core.models.architecture import Architecture, build_architecture

_QWEN_TOWER: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
_QWEN_30B: dict[str, Any] = {
    "num_hidden_layers": 48,
    "head_dim": 128,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family in the table of a page.

    Attributes:
        page: name of the page.
        config: class of its configuration.
        release: the model that has these shapes; None for those that transformers has as defaults.
        changes: what differs from the defaults.
    """

    page: str
    config: str
    release: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "Mixtral": Family(page="mixtures", config="MixtralConfig", release="Mixtral-8x7B"),
    "Qwen2-MoE": Family(page="mixtures", config="Qwen2MoeConfig", release="Qwen1.5-MoE-A2.7B"),
    "Qwen3-MoE": Family(page="mixtures", config="Qwen3MoeConfig", release="Qwen3-30B-A3B", changes=_QWEN_30B),
    "OLMoE": Family(page="mixtures", config="OlmoeConfig", release="OLMoE-1B-7B", changes={"intermediate_size": 1024}),
    "DeepSeek-V2": Family(
        page="mixtures",
        config="DeepseekV2Config",
        release="DeepSeek-V2-Lite",
        changes={
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
        },
    ),
    "DeepSeek-V3": Family(page="mixtures", config="DeepseekV3Config", release="DeepSeek-V3"),
    "gpt-oss": Family(page="mixtures", config="GptOssConfig", release="gpt-oss-120b"),
    "GLM-4-MoE": Family(
        page="mixtures",
        config="Glm4MoeConfig",
        release="GLM-4.5-Air",
        changes={"attention_bias": True, "head_dim": 128},
    ),
    "Granite-MoE": Family(
        page="mixtures",
        config="GraniteMoeConfig",
        release="granite-3.0-1b-a400m",
        changes={
            "vocab_size": 49155,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-MoE": Family(
        page="mixtures",
        config="PhimoeConfig",
        release="Phi-3.5-MoE",
        changes={"attention_bias": True, "lm_head_bias": True},
    ),
    "DBRX": Family(
        page="mixtures",
        config="DbrxConfig",
        release="dbrx-base",
        changes={
            "vocab_size": 100352,
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
            "ffn_config": {
                "hidden_size": 6144,
                "ffn_hidden_size": 10752,
                "moe_num_experts": 16,
                "moe_top_k": 4,
            },
        },
    ),
    "Llama 4, text": Family(page="mixtures", config="Llama4TextConfig", release="Llama-4-Scout-17B-16E"),
    "Qwen2-VL": Family(
        page="vision",
        config="Qwen2VLConfig",
        release="Qwen2-VL-7B",
        changes={"text_config": _QWEN_7B, "vision_config": {"hidden_size": 3584}},
    ),
    "Qwen2.5-VL": Family(
        page="vision",
        config="Qwen2_5_VLConfig",
        release="Qwen2.5-VL-7B",
        changes={
            "text_config": _QWEN_7B,
            "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        },
    ),
    "Qwen3-VL": Family(
        page="vision",
        config="Qwen3VLConfig",
        release="Qwen3-VL-4B",
        changes={
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_heads": 16,
                "out_hidden_size": 2560,
                "deepstack_visual_indexes": [5, 11, 17],
            },
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-VL-MoE": Family(
        page="vision",
        config="Qwen3VLMoeConfig",
        release="Qwen3-VL-30B-A3B",
        changes={"text_config": _QWEN_30B, "vision_config": _QWEN_TOWER},
    ),
    "LLaVA": Family(
        page="vision",
        config="LlavaConfig",
        release="llava-1.5-7b",
        changes={"text_config": {"model_type": "llama", "vocab_size": 32064}},
    ),
    "Idefics3": Family(
        page="vision",
        config="Idefics3Config",
        release="Idefics3-8B-Llama3",
        changes={
            "text_config": {
                "model_type": "llama",
                "vocab_size": 128259,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            "vision_config": _SIGLIP | {"image_size": 364},
            "scale_factor": 2,
            "tie_word_embeddings": False,
        },
    ),
    "SmolVLM": Family(
        page="vision",
        config="SmolVLMConfig",
        release="SmolVLM-Instruct",
        changes={
            "text_config": {
                "model_type": "llama",
                "vocab_size": 49155,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
            },
            "vision_config": _SIGLIP | {"image_size": 384},
            "scale_factor": 3,
            "tie_word_embeddings": False,
        },
    ),
    "Gemma 3": Family(
        page="vision",
        config="Gemma3Config",
        release="gemma-3-4b",
        changes={
            "text_config": {
                "vocab_size": 262208,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
            },
            "vision_config": _SIGLIP | {"image_size": 896, "vision_use_head": False},
        },
    ),
    "Llama 4": Family(
        page="vision",
        config="Llama4Config",
        release="Llama-4-Scout-17B-16E",
        changes={
            "vision_config": {
                "hidden_size": 1408,
                "intermediate_size": 5632,
                "num_hidden_layers": 34,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
                "vision_output_dim": 4096,
                "projector_input_dim": 4096,
                "projector_output_dim": 4096,
            }
        },
    ),
    "Qwen2-Audio": Family(
        page="speech",
        config="Qwen2AudioConfig",
        release="Qwen2-Audio-7B",
        changes={
            "text_config": {
                "model_type": "qwen2",
                "vocab_size": 156032,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
            }
        },
    ),
    "Voxtral": Family(
        page="speech",
        config="VoxtralConfig",
        release="Voxtral-Mini-3B",
        changes={
            "text_config": {
                "model_type": "llama",
                "vocab_size": 131072,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "num_hidden_layers": 30,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            }
        },
    ),
    "Qwen3-ASR": Family(page="speech", config="Qwen3ASRConfig"),
    "Granite Speech": Family(page="speech", config="GraniteSpeechConfig"),
    "VibeVoice": Family(
        page="speech",
        config="VibeVoiceConfig",
        release="VibeVoice-1.5B",
        changes={
            "text_config": {
                "model_type": "qwen2",
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_hidden_layers": 28,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
            "diffusion_head_config": {"hidden_size": 1536, "intermediate_size": 4608},
        },
    ),
    "VibeVoice ASR": Family(
        page="speech",
        config="VibeVoiceAsrConfig",
        release="VibeVoice-ASR",
        changes={"text_config": _QWEN_7B | {"model_type": "qwen2"}},
    ),
    "Qwen3-Omni, the thinker": Family(
        page="speech",
        config="Qwen3OmniMoeThinkerConfig",
        release="Qwen3-Omni-30B-A3B",
        changes={
            "text_config": _QWEN_30B | {"vocab_size": 152064},
            "vision_config": _QWEN_TOWER,
            "audio_config": {"output_dim": 2048},
        },
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fractions:
    """Parts of a model's parameters, which all take the same bytes.

    Attributes:
        parameters: parameters of the model.
        selected: fraction that is compressed.
        without_experts: fraction that is compressed if experts are ignored.
        tower: fraction that `--include vision` adds.
        tables: fraction of token embedding and head, which are compressed where the target is a size.
    """

    parameters: int
    selected: float
    without_experts: float
    tower: float
    tables: float


def fractions_of(family: Family) -> Fractions:
    """Build a model without weights, and return its fractions."""
    config = getattr(transformers, family.config)(**family.changes)
    architecture = build_architecture(config, torch.bfloat16)
    modules = unfused_modules(architecture.model)
    layers = [name for block in architecture.layers for name in block]
    total = architecture.parameters
    return Fractions(
        parameters=total,
        selected=_numbers(architecture, layers) / total,
        without_experts=_numbers(architecture, (name for name in layers if not is_expert_name(name, modules))) / total,
        tower=_numbers(architecture, architecture.tower_layers) / total,
        tables=_numbers(architecture, (table.name for table in architecture.tables)) / total,
    )


def cells(family: Family, found: Fractions) -> list[str]:
    """Return the cells that a family's row has for its fractions, from the release on."""
    columns = {
        "mixtures": (found.selected, found.without_experts),
        "vision": (found.selected, found.tower, found.tables),
        "speech": (found.selected, found.tables),
    }
    shapes = f"{family.release or 'defaults'}, {found.parameters / 1e9:.1f} B"
    return [shapes, *(f"{value:.1%}".replace("%", " %") for value in columns[family.page])]


def _numbers(architecture: Architecture, names: Iterable[str]) -> int:
    shapes = (architecture.shape(name) for name in names)
    return sum(d_in * d_out for d_in, d_out in shapes)


def main() -> None:
    """Print the rows."""
    pages = sorted({family.page for family in FAMILIES.values()})
    parser = argparse.ArgumentParser(description="Print which fraction of each family's bytes is compressed.")
    parser.add_argument("--page", choices=pages, help="only the families of this page")
    parser.add_argument("--family", choices=FAMILIES, help="only this family")
    arguments = parser.parse_args()
    for name, family in FAMILIES.items():
        if arguments.family in (None, name) and arguments.page in (None, family.page):
            print(f"| {name} | {' | '.join(cells(family, fractions_of(family)))} |", flush=True)


if __name__ == "__main__":
    main()
