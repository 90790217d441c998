"""What a compression aims at: a ratio, a size, bits per weight, a measured loss, or one format for every layer."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from rocket_core.sizes.code_format import CodeBits, CodeFormat
from rocket_core.sizes.memory_fit import FittedMemory, MemoryFit

BitsPerWeight = Annotated[float, Field(gt=0, le=16)]
"""Stored bits for each weight of the compressible layers."""

LossMeasure = Literal["max_kl", "max_perplexity_increase"]
"""A bound on a measured loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByRatio:
    """A compression ratio.

    Attributes:
        ratio: fraction of the budget unit to remove from the compressible layers, [0, 1).
    """

    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ByBytes:
    """A size, which counts bytes whatever the budget unit is.

    Attributes:
        target_bytes: upper bound on the bytes of the artifact that the engine reads: of all its safetensors, or of the
            GGUF file.
        fit: the memory that leaves this size for the weights; None if the size was given.
    """

    target_bytes: int
    fit: FittedMemory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ByBits:
    """Bits per weight of the compressible layers, which count bytes whatever the budget unit is.

    Attributes:
        bits: upper bound on the stored bits of these layers for each of their parameters, (0, 16]: codes, scales, masks
            and factors. Biases and the rest of the model are not counted.
    """

    bits: float

    @property
    def text(self) -> str:
        """The number as people say it."""
        return f"{self.bits:.15g} bits per weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class ByError:
    """An error, which can be asked of a profiled model only.

    Attributes:
        error: upper bound on the predicted error, >= 0, in the unit of the profile's objective.
    """

    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ByFormat:
    """Every layer as integer codes of the same bits, with float16 scales of groups of the same size.

    Attributes:
        bits: bits of a code.
        group_size: inputs that share a scale; 0 for all inputs of an output.
    """

    bits: CodeBits
    group_size: int

    def code_format(self, d_in: int) -> CodeFormat:
        """Return the format of a layer; groups have at most all of its inputs."""
        return CodeFormat(bits=self.bits, group_size=min(self.group_size or d_in, d_in), scale_bits=16)

    @property
    def text(self) -> str:
        """The format as people say it."""
        return f"{self.bits} bits, {f'groups of {self.group_size}' if self.group_size else 'a scale per output'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLoss:
    """A measured loss, with the file as small as possible, which counts bytes whatever the budget unit is.

    Attributes:
        measure: what is measured: the KL divergence from the original, or the increase of the perplexity.
        bound: the most that is measured, above 0: nats per token, or a fraction of the original's perplexity.
    """

    measure: LossMeasure
    bound: float

    @property
    def text(self) -> str:
        """The bound as people say it."""
        if self.measure == "max_kl":
            return f"KL divergence of at most {self.bound:.4g} nats per token"
        return f"perplexity increase of at most {100 * self.bound:.4g} %"

    @property
    def nats(self) -> float:
        """The bound as an increase of the loss, in nats per token."""
        return self.bound if self.measure == "max_kl" else math.log1p(self.bound)


Target = ByRatio | ByBytes | ByBits | ByFormat | ByLoss


MEMBERS: frozenset[str] = frozenset({"ratio", "target_bytes", "bits", "fit", *get_args(LossMeasure)})
"""Members of a request, a row or settings that each specify a target."""
TARGET_NAMES = "ratio, target_bytes, bits, fit, max_kl and max_perplexity_increase"
"""The same as people read them."""


def target_of(members: Mapping[str, float | int | MemoryFit | None]) -> ByRatio | ByBytes | ByBits | ByLoss | None:
    """Return the target that members of a request, a row or settings specify; None if none is given.

    Args:
        members: values by name, some of `MEMBERS`; those that are None are not given.

    Raises:
        ValueError: more than one is given.
    """
    given: Mapping[str, Any] = {name: value for name, value in members.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"specify only one of {TARGET_NAMES}")
    match given:
        case {"fit": fit}:
            return _within(fit)
        case {"ratio": ratio}:
            return ByRatio(ratio=float(ratio))
        case {"target_bytes": size}:
            return ByBytes(target_bytes=int(size))
        case {"bits": bits}:
            return ByBits(bits=float(bits))
        case _:
            losses = (ByLoss(measure=name, bound=float(given[name])) for name in get_args(LossMeasure) if name in given)
            return next(losses, None)


def _within(fit: MemoryFit) -> ByBytes:
    if isinstance(fit, FittedMemory):
        return ByBytes(target_bytes=fit.weights_bytes, fit=fit)
    # The most that weights can take, until the model is known; see `inspection.checks.context_fit`.
    return ByBytes(target_bytes=fit.memory_bytes)


_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_WRITTEN_SIZE = re.compile(r"\s*(\d*\.?\d+)\s*([a-zA-Z]*)\s*")
# No model has so few bytes, and people who write such a number mean another unit.
_LEAST_WITHOUT_UNIT = 1000


def parse_size(text: str) -> int:
    """Return the bytes of a size as people write it: 500MB, 1.5 GB, 700MiB, or a number of bytes.

    Raises:
        ValueError: the text is something else; the message says what to write.
    """
    if text.strip().endswith("%"):
        part = text.strip().removesuffix("%").strip()
        raise ValueError(f"{text!r} is not a size; write for example 500MB, or give a ratio: {part}% is removed then")
    written = _WRITTEN_SIZE.fullmatch(text)
    try:
        size = int(_SIZE.validate_python(text)) if written else None
    except ValidationError:
        size = None
    if written is None or size is None:
        raise ValueError(f"{text!r} is not a size; use a number of bytes, or for example 500MB, 1.5GB, 700MiB")
    if not written[2] and size < _LEAST_WITHOUT_UNIT:
        raise ValueError(f"{text} without a unit is a number of bytes; write for example {text}MB or {text}GB")
    return size
