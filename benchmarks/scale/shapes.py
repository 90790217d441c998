"""Models with the shapes of real ones, but few blocks and a small vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The shapes of a model.

    Attributes:
        name: the model whose shapes these are.
        config_class: its class of settings.
        settings: hidden sizes, heads and experts.
        blocks: blocks of the whole model.
        vocabulary: tokens of the whole model.
        tied: whether the head is the embedding.
    """

    name: str
    config_class: Callable[..., PretrainedConfig]
    settings: Mapping[str, Any]
    blocks: int
    vocabulary: int
    tied: bool

    def config(self, *, blocks: int, vocabulary: int) -> PretrainedConfig:
        """Return the settings of a model with fewer blocks and tokens."""
        return self.config_class(
            **self.settings,
            num_hidden_layers=blocks,
            vocab_size=vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=8192,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            dtype="bfloat16",
        )

    def with_experts(self, experts: int) -> "ModelSize":
        """Return the shapes with fewer experts, of which each still gets the same part of the tokens."""
        whole = int(self.settings["num_experts"])
        chosen = max(1, int(self.settings["num_experts_per_tok"]) * experts // whole)
        fewer = {"num_experts": experts, "num_experts_per_tok": chosen}
        return replace(self, name=f"{self.name}, {experts} of {whole} experts", settings={**self.settings, **fewer})

    def table_parameters(self) -> int:
        """Return the parameters of embedding and head of the whole model."""
        return (1 if self.tied else 2) * self.vocabulary * int(self.settings["hidden_size"])


SIZES: Mapping[str, ModelSize] = MappingProxyType(
    {
        "llama-3.2-1b": ModelSize(
            name="Llama-3.2-1B",
            config_class=LlamaConfig,
            settings={
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
            },
            blocks=16,
            vocabulary=128256,
            tied=True,
        ),
        "qwen3-8b": ModelSize(
            name="Qwen3-8B",
            config_class=Qwen3Config,
            settings={
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            blocks=36,
            vocabulary=151936,
            tied=False,
        ),
        "llama-3.3-70b": ModelSize(
            name="Llama-3.3-70B",
            config_class=LlamaConfig,
            settings={
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            blocks=80,
            vocabulary=128256,
            tied=False,
        ),
        "qwen3-30b-a3b": ModelSize(
            name="Qwen3-30B-A3B",
            config_class=Qwen3MoeConfig,
            settings={
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
            },
            blocks=48,
            vocabulary=151936,
            tied=False,
        ),
        "tiny": ModelSize(
            name="a tiny Llama",
            config_class=LlamaConfig,
            settings={
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            blocks=4,
            vocabulary=2048,
            tied=True,
        ),
    }
)
"""By the name on the command line; `tiny` is to try the benchmark itself."""
