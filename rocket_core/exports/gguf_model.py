"""A model as a GGUF file: what it will contain, judged and planned from settings and tokenizer. Loads no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket_core.errors import UnsupportedExportError
from rocket_core.exports.gguf_families import (
    Family,
    family_metadata,
    family_of,
    head_dim,
    is_tied,
    key_heads,
    rope_factors,
)
from rocket_core.exports.gguf_file import GgufValue, Storage, gguf_bytes
from rocket_core.exports.gguf_tokenizer import tokenizer_metadata

_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_HEAD = "lm_head.weight"
# Version of the block types' layouts.
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRules:
    """How a tensor of a checkpoint is written.

    Attributes:
        name: its name in the file.
        head_rows: rows of a head whose two halves are interleaved; 0 if rows stay in place.
        shift: what is added to each number.
    """

    name: str
    head_rows: int = 0
    shift: float = 0.0

    def row_order(self, rows: int) -> list[int] | None:
        """Return for each row of the file the row of the checkpoint; None if rows stay in place.

        Args:
            rows: rows of the tensor, whole heads.
        """
        if not self.head_rows:
            return None
        assert rows % self.head_rows == 0, (self.name, rows, self.head_rows)
        half = self.head_rows // 2
        within = [place + side * half for place in range(half) for side in range(2)]
        return [begin + place for begin in range(0, rows, self.head_rows) for place in within]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufPlan:
    """What the file of a model will contain.

    Attributes:
        family: the model's family.
        metadata: metadata of the file.
        computed: tensors that follow from the settings, by name; stored as F32.
        tied: whether the head is the token embedding.
        head_rows: rows of a head of queries and keys.
    """

    family: Family
    metadata: Mapping[str, GgufValue]
    computed: Mapping[str, tuple[float, ...]]
    tied: bool
    head_rows: int

    def tensor(self, key: str) -> TensorRules | None:
        """Return how a tensor of the checkpoint is written; None if it is left out.

        Args:
            key: its name in the checkpoint.

        Raises:
            UnsupportedExportError: llama.cpp has no such tensor.
        """
        if key.endswith("rotary_emb.inv_freq") or (key == _HEAD and self.tied):
            return None
        shift = 1.0 if self.family.shifted_norms and key.endswith("norm.weight") else 0.0
        if key == _HEAD:
            return TensorRules(name="output.weight")
        if key in _WHOLE:
            return TensorRules(name=_WHOLE[key], shift=shift)
        block = _BLOCK.fullmatch(key)
        module = self.family.modules.get(block[2]) if block else None
        if block is None or module is None:
            raise UnsupportedExportError(f"llama.cpp's {self.family.arch} has no tensor for {key}")
        turned = self.family.interleaved and module in {"attn_q", "attn_k"}
        return TensorRules(
            name=f"blk.{block[1]}.{module}.{block[3]}", head_rows=self.head_rows if turned else 0, shift=shift
        )

    def storage(self, key: str, shape: Sequence[int], wanted: Storage) -> Storage:
        """Return how a tensor is stored: as wanted, except that vectors are always F32.

        Args:
            key: its name in the checkpoint.
            shape: its shape.
            wanted: storage for matrices.
        """
        return "F32" if len(shape) == 1 or "norm" in key else wanted

    def file_bytes(self, tensors: Iterable[tuple[str, Sequence[int], Storage]]) -> int:
        """Return the size of the file.

        Args:
            tensors: name in the checkpoint, shape and wanted storage of each tensor of the checkpoint.
        """
        planned: list[tuple[str, Sequence[int], Storage]] = [
            (name, (len(values),), "F32") for name, values in self.computed.items()
        ]
        for key, shape, wanted in tensors:
            rules = self.tensor(key)
            if rules is not None:
                planned.append((rules.name, shape, self.storage(key, shape, wanted)))
        return gguf_bytes(self.metadata, planned)


def plan_gguf(config: Mapping[str, Any], folder: Path, *, name: str | None = None) -> GgufPlan:
    """Plan the file of a model.

    Args:
        config: the model's settings.
        folder: folder with its tokenizer.
        name: the model's name in the file; None leaves it out.

    Raises:
        UnsupportedExportError: llama.cpp cannot express the model or its tokenizer.
    """
    try:
        return _plan(config, folder, name)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedExportError(
            f"The model cannot be written for llama.cpp: a value is missing or malformed in its settings or tokenizer"
            f" ({type(error).__name__}: {error})"
        ) from error


def _plan(config: Mapping[str, Any], folder: Path, name: str | None) -> GgufPlan:
    family = family_of(config)
    heads = int(config["num_attention_heads"])
    if heads % key_heads(config):
        raise UnsupportedExportError("The heads of queries are not a multiple of those of keys")
    return GgufPlan(
        family=family,
        metadata={
            "general.architecture": GgufValue("string", family.arch),
            "general.type": GgufValue("string", "model"),
            **({} if name is None else {"general.name": GgufValue("string", name)}),
            "general.quantization_version": GgufValue("uint32", _QUANTIZATION_VERSION),
            **family_metadata(config, family),
            **tokenizer_metadata(folder, config, int(config["vocab_size"])),
        },
        computed=rope_factors(config, family),
        tied=is_tied(config, family),
        head_rows=head_dim(config),
    )


def check_gguf(config: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if a model cannot be written for llama.cpp; reads settings and tokenizer only.

    Args:
        config: the model's settings.
        folder: folder with its tokenizer.

    Raises:
        UnsupportedExportError: names what llama.cpp cannot express.
    """
    plan_gguf(config, folder)
