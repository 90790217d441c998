"""What an engine reads: the description that restricts candidates and decides the exports. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from rocket_core.code_format import CodeChoices

EngineName = Literal["rocket", "vllm", "llama.cpp"]
ExportKind = Literal["factored", "dense", "compressed-tensors", "gguf"]
LaterExport = Literal["dense", "gguf", "compressed-tensors"]
"""Exports that can be made from a finished `factored` one."""
Kind = Literal["low_rank", "factored", "shared", "sparse", "quantized", "entropy_coded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An engine that runs compressed models.

    Attributes:
        name: value of the option `engine`.
        title: its name as people write it.
        exports: the exports that it is offered by default; the first is the one whose size a target in bytes limits.
        readable: every export that may be asked for.
        kinds: ways to store a layer that it reads.
        codes: the formats of integer codes that it reads.
        one_format_per_input: whether all layers that read the same input must be stored in the same way, because the
            engine fuses them.
        experts_agree: which layers of experts must be stored in the same way: those of a `projection` (gate, up or
            down) of a block, or all of the `model`; None for none.
        mixtures: classes of mixtures of experts among `classes`.
        exact: last parts of the names of layers that it reads as they are.
        tables: whether it reads a quantized token embedding and head.
        layer_bytes: bytes that a quantized layer takes in its file in addition to codes and scales.
        classes: model classes that it runs, or their endings.
        sixteen_bits: whether the model must be stored in 16 bits.
    """

    name: EngineName
    title: str
    exports: tuple[ExportKind, ...]
    readable: tuple[ExportKind, ...]
    kinds: tuple[Kind, ...]
    codes: CodeChoices
    one_format_per_input: bool = False
    experts_agree: Literal["projection", "model"] | None = None
    mixtures: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    tables: bool = False
    layer_bytes: int = 0
    classes: tuple[str, ...] = ()
    sixteen_bits: bool = False
