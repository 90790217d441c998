"""A model as a GGUF file: what it will contain, judged and planned from settings and tokenizer. Loads no torch."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from rocket_core.exports.gguf_mixtures import ROUTERS, SINKS, expert_count
from rocket_core.exports.gguf_projector import ProjectorPlan, plan_projector, text_key, text_settings
from rocket_core.exports.gguf_tensors import PlannedTensor, TensorRules
from rocket_core.exports.gguf_tokenizer import tokenizer_metadata

_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
_WRITTEN = re.compile(r"blk\.(\d+)\.([^.]+)\.(weight|bias)")
_HEAD = "lm_head.weight"
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    _HEAD: "output.weight",
}
# Version of the block types' layouts.
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufPlan:
    """What the file of a model will contain.

    Attributes:
        family: the model's family.
        metadata: metadata of the file.
        computed: tensors that follow from the settings, by name; stored as F32.
        tied: whether the head is the token embedding.
        head_rows: rows of a head of queries and keys.
        experts: experts of a block; 0 if it has none.
        projector: what the projector file next to it contains, if the model reads images.
    """

    family: Family
    metadata: Mapping[str, GgufValue]
    computed: Mapping[str, tuple[float, ...]]
    tied: bool
    head_rows: int
    experts: int = 0
    projector: ProjectorPlan | None = None

    def tensor(self, key: str) -> TensorRules | None:
        """Return how a tensor of the checkpoint is written; None if it is left out, or in the projector file.

        Args:
            key: its name in the checkpoint.

        Raises:
            UnsupportedExportError: llama.cpp has no such tensor.
        """
        if self.projector is not None:
            if self.projector.tensor(key) is not None:
                return None
            key = text_key(key)
        if key.endswith("rotary_emb.inv_freq") or (key == _HEAD and self.tied):
            return None
        shift = 1.0 if self.family.shifted_norms and key.endswith("norm.weight") else 0.0
        if key in _WHOLE:
            return TensorRules(name=_WHOLE[key], shift=shift)
        block = _BLOCK.fullmatch(key)
        expert = _EXPERT.fullmatch(block[2]) if block else None
        module = self.family.modules.get(expert[1] + expert[3] if expert else block[2]) if block else None
        if block is None or module is None:
            raise UnsupportedExportError(f"llama.cpp's {self.family.arch} has no tensor for {key}")
        turned = self.family.interleaved and module in {"attn_q", "attn_k"}
        return TensorRules(
            name=f"blk.{block[1]}.{module}.{block[3] or 'weight'}",
            head_rows=self.head_rows if turned else 0,
            shift=shift,
            exact=module in ROUTERS or module.endswith("norm"),
            flat=module == "ffn_gate_inp_shexp",
            expert=int(expert[2]) if expert else None,
        )

    def tensors(self, stored: Iterable[tuple[str, Sequence[int], Storage]]) -> list[PlannedTensor]:
        """Return the tensors of the file that are written from the checkpoint, in their order.

        Args:
            stored: name, shape and wanted storage of each tensor of the checkpoint; the storage applies to matrices.

        Raises:
            UnsupportedExportError: llama.cpp has no such tensor, or an expert is missing.
        """
        parts: dict[str, dict[str, TensorRules]] = {}
        forms: dict[str, set[tuple[tuple[int, ...], Storage]]] = {}
        for key, shape, wanted in stored:
            rules = self.tensor(key)
            if rules is not None:
                parts.setdefault(rules.name, {})[key] = rules
                forms.setdefault(rules.name, set()).add(rules.form(shape, wanted))
        return [self._joined(name, found, forms[name]) for name, found in parts.items()]

    def _joined(
        self, name: str, parts: Mapping[str, TensorRules], forms: Collection[tuple[tuple[int, ...], Storage]]
    ) -> PlannedTensor:
        assert len(forms) == 1, f"the experts in {name} differ: {forms}"
        [(shape, storage)] = forms
        experts = [rules.expert for rules in parts.values() if rules.expert is not None]
        if experts:
            if sorted(experts) != list(range(self.experts)):
                raise UnsupportedExportError(
                    f"The checkpoint has {len(experts)} experts for {name}, and its settings {self.experts}; "
                    "fetch the checkpoint again"
                )
            shape = (self.experts, *shape)
            parts = dict(sorted(parts.items(), key=lambda part: part[1].expert or 0))
        return PlannedTensor(name=name, shape=shape, storage=storage, parts=parts)

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the names in a checkpoint of what a tensor of the file is written from; none if it is computed.

        Args:
            name: its name in the file.

        Raises:
            UnsupportedExportError: the family has no such tensor.
        """
        if name in self.computed:
            return ()
        whole = next((key for key, written in _WHOLE.items() if written == name), None)
        if whole is not None:
            return (whole,)
        block = _WRITTEN.fullmatch(name)
        module = {known: module for module, known in self.family.modules.items()}.get(block[2]) if block else None
        if block is None or module is None:
            raise UnsupportedExportError(f"llama.cpp's {self.family.arch} has no tensor {name}")
        if module == SINKS:
            return (f"model.layers.{block[1]}.{SINKS}",)
        before, experts, projection = module.partition(".experts.")
        modules = [f"{before}.experts.{number}.{projection}" for number in range(self.experts)] if experts else [module]
        return tuple(f"model.layers.{block[1]}.{module}.{block[3]}" for module in modules)

    def file_bytes(self, stored: Iterable[tuple[str, Sequence[int], Storage]]) -> int:
        """Return the size of the file, with that of the projector file.

        Args:
            stored: see `tensors`.
        """
        stored = list(stored)
        planned: list[tuple[str, Sequence[int], Storage]] = [
            (name, (len(values),), "F32") for name, values in self.computed.items()
        ]
        planned += [(tensor.name, tensor.shape, tensor.storage) for tensor in self.tensors(stored)]
        projector = 0 if self.projector is None else self.projector.file_bytes(stored)
        return gguf_bytes(self.metadata, planned) + projector


def plan_gguf(config: Mapping[str, Any], folder: Path, *, name: str | None = None) -> GgufPlan:
    """Plan the file of a model.

    Args:
        config: the model's settings.
        folder: folder with its tokenizer, and the settings of its image processor if it reads images.
        name: the model's name in the file; None leaves it out.

    Raises:
        InvalidConfigError: the model reads images, and the package `gguf` is not installed.
        UnsupportedExportError: llama.cpp cannot express the model or its tokenizer.
    """
    try:
        return replace(_plan(text_settings(config), folder, name), projector=plan_projector(config, folder))
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
        experts=0 if family.mixture is None else expert_count(config),
    )
