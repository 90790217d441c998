"""Weights as integers of a few bits, with a scale for every group of inputs of every output."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from jaxtyping import Bool, Float, Float32, Int8, Shaped, UInt8
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels import for_device
from rocket_core.linalg.kernels.tries import Tries
from rocket_core.sizes.code_format import CodeFormat

# The smallest scale that the search tries, as a part of the one that represents the largest weight of the group.
_LEAST_PART = 0.4
# Scales in float16 that the search tries per octave.
_TRIES_PER_OCTAVE = 16
# Tables of scales that are kept.
_TABLES = 256
# The smallest part of a unit in float16.
_LEAST_HALF = 2.0**-24


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """The scales of a layer, as they are stored.

    Attributes:
        codes: float16 parts of the unit; or, for logarithmic scales, in uint8, the number of steps below the unit plus,
            for negative scales, 2^(scale_bits - 1).
        exponent: logarithm of the unit, in steps: 2^(exponent / steps_per_octave). No logarithmic scale is larger.
        format: bits of codes and scales, and the size of groups.
    """

    codes: Shaped[Tensor, "groups d_out"]
    exponent: int
    format: CodeFormat

    @classmethod
    def nearest(cls, values: Float[Tensor, "groups d_out"], exponent: int, code_format: CodeFormat) -> "Scales":
        """Round scales to what can be stored; none becomes zero, so that every code has a meaning.

        Logarithmic scales above the unit become the unit; those below the range of 5 (6 bits) or 10 octaves (8 bits)
        become its lower end.

        Args:
            values: any finite numbers.
            exponent: see the attribute.
            code_format: see the attribute.
        """
        octave, bits = code_format.steps_per_octave, code_format.scale_bits
        parts = (values.abs() / 2.0 ** (exponent / octave)).clamp_min(_LEAST_HALF)
        if bits == 16:
            brief = parts.bfloat16().to(parts.dtype) if code_format.bfloat16_scales else parts
            return cls(codes=brief.copysign(values).half(), exponent=exponent, format=code_format)
        sign = 2 ** (bits - 1)
        steps = (-parts.log2() * octave).round().clamp_(0, sign - 1)
        codes = (steps + sign * (values < 0)).to(torch.uint8)
        return cls(codes=codes, exponent=exponent, format=code_format)

    def values(self, dtype: torch.dtype) -> Float[Tensor, "groups d_out"]:
        """Return the scales, exact or computed in float64, rounded once, so that equal bytes give equal numbers."""
        octave, bits = self.format.steps_per_octave, self.format.scale_bits
        if bits == 16:
            exact = torch.float64 if dtype == torch.float64 else torch.float32
            return (2.0**self.exponent * self.codes.to(exact)).to(dtype)
        return _table(self.exponent, octave, bits, self.codes.device, dtype)[self.codes.int()]

    def by_input(self, d_in: int, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return the scale of every entry of the weight."""
        return self.values(dtype).repeat_interleave(self.format.group_size, dim=0)[:d_in]

    @property
    def levels(self) -> Levels:
        """What codes can be."""
        half = 2 ** (self.format.bits - 1)
        return Levels(least=-half, largest=half - 1)

    def shifted(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """Return the weight itself: the code of zero is zero."""
        return weight

    def rounded(self, codes: Int8[Tensor, "d_in d_out"]) -> "RoundedWeight":
        """Return the weight with these codes."""
        return RoundedWeight(codes=codes, scales=self)


def scale_values(exponent: int, code_format: CodeFormat) -> tuple[Float32[Tensor, " scales"], float]:
    """Return a number for each code of a scale, and what that is multiplied with for the scale; see `Scales.values`."""
    if code_format.scale_bits == 16:
        return _halves(), 2.0**exponent
    octave, bits = code_format.steps_per_octave, code_format.scale_bits
    return _table(exponent, octave, bits, torch.device("cpu"), torch.float32), 1.0


@cache
def _halves() -> Float32[Tensor, "65536"]:
    """Return the numbers of float16 by their bits."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()


@lru_cache(_TABLES)
def _table(exponent: int, octave: int, bits: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, " scales"]:
    """Return all logarithmic scales, not computed on the device, as exp2 has other last bits on other devices."""
    magnitudes = [2.0 ** ((exponent - step) / octave) for step in range(2 ** (bits - 1))]
    signed = magnitudes + [-magnitude for magnitude in magnitudes]
    return torch.tensor(signed, dtype=torch.float64).to(device, dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedWeight:
    """A weight W̃_ij = scale_gj · code_ij, where g is the group of input i.

    Attributes:
        codes: see `CodeFormat.bits`.
        scales: a scale for each group and output.
        entropy_coded: whether codes are stored entropy coded instead of in a fixed number of bits each.
        stream: the entropy-coded codes, on the CPU, if they have been coded.
    """

    codes: Int8[Tensor, "d_in d_out"]
    scales: Scales
    entropy_coded: bool = False
    stream: UInt8[Tensor, " bytes"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(d_in, d_out)` of the layer."""
        d_in, d_out = self.codes.shape
        return d_in, d_out

    def replaced(self, other: "RoundedWeight", outputs: Bool[Tensor, " d_out"]) -> "RoundedWeight":
        """Return this weight with some outputs of another one, whose scales have the same unit."""
        own, others = self.scales, other.scales
        assert (own.exponent, own.format) == (others.exponent, others.format)
        return RoundedWeight(
            codes=torch.where(outputs, other.codes, self.codes),
            scales=replace(own, codes=torch.where(outputs, others.codes, own.codes)),
        )

    @classmethod
    def of_parts(cls, parts: Sequence["RoundedWeight"]) -> "RoundedWeight":
        """Return the weight whose outputs are those of all parts, whose scales have the same unit."""
        scales = torch.cat([part.scales.codes for part in parts], dim=1)
        codes = torch.cat([part.codes for part in parts], dim=1)
        return cls(codes=codes, scales=replace(parts[0].scales, codes=scales))

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return W̃, a transposed view of `rows`."""
        return self.rows(dtype).T

    def rows(self, dtype: torch.dtype) -> Float[Tensor, "d_out d_in"]:
        """Return W̃ᵀ, in the orientation of `nn.Linear`, in new row-major memory.

        Computed in float32, or in float64 if that is the dtype, and rounded once.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        d_in, d_out = self.shape
        size = min(self.scales.format.group_size, d_in)
        whole = d_in // size
        rows = torch.empty(d_out, d_in, dtype=exact, device=self.codes.device).copy_(self.codes.T)
        scales = self.scales.values(exact).T
        rows[:, : whole * size].view(d_out, whole, size).mul_(scales[:, :whole, None])
        rows[:, whole * size :].mul_(scales[:, whole:])
        return rows.to(dtype)


def search_scales(
    weight: Float[Tensor, "d_in d_out"],
    importance: Float[Tensor, " d_in"],
    code_format: CodeFormat,
    *,
    positive: bool = False,
    exponent: int | None = None,
) -> Scales:
    """Return for each group and output the scale that minimises Σ_i h_i (w_i - w̃_i)², every w̃_i rounded to nearest.

    Tried are scales of both signs, from the one that represents the largest weight of the group down to 0.4 of it.
    Logarithmic scales are chosen among those that can be stored.

    Args:
        weight: W.
        importance: h, >= 0, for instance the diagonal of the Gram matrix.
        code_format: how the weight will be stored.
        positive: try positive scales only, and for that also larger ones, as the largest weight may be positive.
        exponent: see `Scales.exponent`; None takes `scale_exponent` of the weight. With the exponent of a whole weight,
            some of its outputs get the scales that they have in the whole.
    """
    grouped = by_group(weight.to(torch.promote_types(weight.dtype, torch.float32)), code_format)
    weights = by_group((importance / importance.mean().clamp_min(1e-30))[:, None], code_format)
    half = 2 ** (code_format.bits - 1)
    largest = grouped.abs().amax(dim=1) / (half - 1 if positive else half)
    octave = code_format.steps_per_octave
    if exponent is None:
        exponent = scale_exponent(weight, code_format, positive=positive)
    tries = _TRIES_PER_OCTAVE if code_format.scale_bits == 16 else octave
    unit = 2.0 ** (exponent / octave)
    least_part = _LEAST_PART * (1 - positive / half)
    choices = Tries(
        unit=unit,
        per_octave=tries,
        last=math.inf if code_format.scale_bits == 16 else 2.0 ** (code_format.scale_bits - 1) - 1,
        count=math.ceil(-math.log2(least_part) * tries) + 1,
        half=half,
        positive=positive,
    )
    # Place of the next larger scale that can be stored.
    first = (-torch.log2((largest / unit).clamp_min(_LEAST_HALF)) * tries).floor_()
    best = for_device(weight.device).best_scales(grouped, weights, first, choices)
    return Scales.nearest(best, exponent, code_format)


def scale_exponent(weight: Float[Tensor, "d_in d_out"], code_format: CodeFormat, *, positive: bool = False) -> int:
    """Return the exponent of the smallest unit that represents all weights; see `Scales.exponent`.

    Args:
        weight: W.
        code_format: how the weight will be stored.
        positive: whether scales will be positive only.
    """
    half = 2 ** (code_format.bits - 1)
    return exponent_above(float(weight.abs().amax() / (half - 1 if positive else half)), code_format)


def exponent_above(largest: float, code_format: CodeFormat) -> int:
    """Return the exponent of the smallest unit that is at least a scale, or of the largest unit.

    Args:
        largest: the scale, >= 0.
        code_format: how the weight will be stored.
    """
    if code_format.bfloat16_scales:
        return 0
    # Steps, so that outputs have the same scales whatever other outputs the layer has.
    logarithm = math.log2(max(largest, torch.finfo(torch.float32).tiny))
    most = code_format.largest_exponent
    return max(-most, min(math.ceil(logarithm * code_format.steps_per_octave), most))


def by_group(rows: Float[Tensor, "d_in columns"], code_format: CodeFormat) -> Float[Tensor, "groups size columns"]:
    """Return rows by the group of their input; the last group is filled up with zeros."""
    missing = -len(rows) % code_format.group_size
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    return rows.view(-1, code_format.group_size, rows.shape[1])
