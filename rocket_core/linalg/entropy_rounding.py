"""Rounding of a weight to integer codes that will be entropy coded: error is weighed against the bits of each code.

Every output has one step. At high rate an entry with step s has the squared error s²/12 and h - log2 s bits: the best
steps give every entry of every layer the same weighted error c²/12, and a bit is worth (ln 2 / 6) c² of error. With
(G + damping)⁻¹ = UᵀU, an error e at input i costs e² / U_ii² after all later inputs have compensated what they can.

References:
    Gray and Neuhoff, "Quantization", 1998, sections 5 and 6 (rate and error at high rate).
    Sullivan and Wiegand, "Rate-distortion optimization for video compression", 1998.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.integer_codes import RoundedWeight, Scales, exponent_above
from rocket_core.linalg.kernels.rate import LARGEST_CODE, Rate, occurrences
from rocket_core.linalg.rounding import RoundingGram, descend, errors_from, gptq_and_errors
from rocket_core.sizes.code_format import coded_format

# Error that a bit is worth, as a part of the squared step: the slope of the curve at high rate.
_BIT_WORTH = math.log(2) / 6
# Codes of the largest weight of an output are at most about this, which leaves room for what it compensates.
_REACH = 115
# Multiples of it are spread evenly between integers.
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# Added to the count of every code, so that those that did not occur have a finite length.
_UNSEEN = 0.02


def relative_steps(gram: RoundingGram, importance: Float[Tensor, " d_out"]) -> Float[Tensor, " d_out"]:
    """Return the step of each output for c = 1: the geometric mean of U_ii over the root of the output's importance.

    Args:
        gram: prepared Gram matrix.
        importance: weight of each output's squared error, > 0.

    Raises:
        torch.linalg.LinAlgError: the matrix is not positive definite.
    """
    pivot = gram.factor.diagonal().double().log().mean().exp()
    return (pivot * importance.double().rsqrt()).to(gram.matrix.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScales:
    """Scales of a weight for any multiple c of some steps, on the logarithmic grid of those that can be stored.

    Each is large enough for its output's weights. Whether a step is rounded up or down also depends on its place, so
    that equal steps do not all change at once: the bytes of a layer would.

    Attributes:
        weight: W.
        steps: step of each output for c = 1, > 0.
        least: the least step of each output.
        shift: what each step is multiplied by: a part of the distance between two scales.
        largest: the largest step for c = 1, and the largest of the least ones.
    """

    weight: Float[Tensor, "d_in d_out"]
    steps: Float[Tensor, " d_out"]
    least: Float[Tensor, " d_out"]
    shift: Float[Tensor, " d_out"]
    largest: tuple[float, float]

    @classmethod
    def of(cls, weight: Float[Tensor, "d_in d_out"], steps: Float[Tensor, " d_out"]) -> "StepScales":
        """Prepare the scales, for which a GPU is waited for once."""
        places = torch.arange(len(steps), device=steps.device, dtype=torch.float64)
        per_octave = coded_format(len(weight)).steps_per_octave
        shift = torch.exp2(((places * _GOLDEN_RATIO) % 1 - 0.5) / per_octave).to(steps.dtype)
        least = weight.abs().amax(dim=0) / _REACH
        step, bound = (torch.stack([steps, least]) * shift).amax(dim=1).tolist()
        return cls(weight=weight, steps=steps, least=least, shift=shift, largest=(step, bound))

    def at(self, c: float) -> Scales:
        """Return the scales for a multiple."""
        code_format, (step, bound) = coded_format(len(self.weight)), self.largest
        spread = torch.maximum(c * self.steps, self.least) * self.shift
        return Scales.nearest(spread[None], exponent_above(max(c * step, bound), code_format), code_format)


def code_lengths(codes: Tensor) -> Float[Tensor, "255"]:
    """Return the ideal length of each code from -127 to 127 in bits, given how often it occurs."""
    counts = _counts(codes) + _UNSEEN
    return -(counts / counts.sum()).log2()


def entropy_bits(codes: Tensor) -> Float[Tensor, ""]:
    """Return the entropy of codes, in bits per code, on their device."""
    counts = _counts(codes)
    parts = counts / counts.sum()
    return -torch.where(counts > 0, parts * parts.log2(), 0).sum()


def _counts(codes: Tensor) -> Float[Tensor, "255"]:
    """Return how often each code from -127 to 127 occurs."""
    counts = occurrences(codes.to(torch.int8).reshape(-1).view(torch.uint8), 256)
    return torch.cat([counts[-LARGEST_CODE:], counts[: LARGEST_CODE + 1]]).double()


def round_each(weight: Float[Tensor, "d_in d_out"], scales: Scales) -> RoundedWeight:
    """Round every entry by itself, to codes within ±127."""
    codes = (weight / scales.values(weight.dtype)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return RoundedWeight(codes=codes.to(torch.int8), scales=scales, entropy_coded=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTarget:
    """What a weight is rounded for.

    Attributes:
        scales: one scale for each output.
        lengths: bits of each code from -127 to 127.
        worth: error that a bit is worth for each output, see `bit_worth`.
    """

    scales: Scales
    lengths: Float[Tensor, "255"]
    worth: Float[Tensor, " d_out"]

    @classmethod
    def of(
        cls,
        steps: StepScales,
        importance: Float[Tensor, " d_out"],
        c: float,
        like: Tensor | None = None,
    ) -> "RateTarget":
        """Return the target for a multiple of the relative steps.

        Args:
            steps: `relative_steps` of the weight.
            importance: weight of each output's squared error, > 0.
            c: the multiple.
            like: codes with about the distribution that will result; those of rounding every entry by itself if None.
        """
        scales = steps.at(c)
        codes = round_each(steps.weight, scales).codes if like is None else like
        worth = bit_worth(importance, c).to(steps.weight.dtype)
        return cls(scales=scales, lengths=code_lengths(codes), worth=worth)


def round_for_rate(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, target: RateTarget
) -> tuple[RoundedWeight, Float[Tensor, " d_out"]]:
    """Round input by input as `gptq` does, and take of two codes the one with the least error plus the worth of bits.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        target: what to round it for.

    Returns:
        See `gptq_and_errors`.
    """
    grid = _CodedGrid(scales=target.scales)
    return gptq_and_errors(weight, gram, grid, grid.rate(target.lengths, target.worth))


def improve_for_rate(
    weight: Float[Tensor, "d_in d_out"],
    gram: RoundingGram,
    rounded: RoundedWeight,
    worth: Float[Tensor, " d_out"],
    *,
    sweeps: int = 2,
) -> tuple[RoundedWeight, Float[Tensor, " d_out"]]:
    """Change one code of each output at a time if that reduces the error plus the worth of bits.

    The length of each code is that of the rounding before the sweep.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        rounded: the rounding to start from.
        worth: see `RateTarget`.
        sweeps: number of visits to every entry.

    Returns:
        The rounding, and the error of each output under the damped matrix, in float64.
    """
    grid, slope = _CodedGrid(scales=rounded.scales), gram.slope(weight, rounded)
    for _ in range(sweeps):
        rate = grid.rate(code_lengths(rounded.codes), worth)
        rounded = descend(weight, gram, rounded, slope, grid=grid, rate=rate, sweeps=1)
    return rounded, errors_from(slope, weight, rounded)


def bit_worth(importance: Float[Tensor, " d_out"], c: float) -> Float[Tensor, " d_out"]:
    """Return the unweighted squared error that a bit is worth for each output, (ln 2 / 6) c² / importance.

    Args:
        importance: weight of each output's squared error, > 0.
        c: multiple of the relative steps.
    """
    return _BIT_WORTH * c**2 / importance


@dataclass(frozen=True, kw_only=True, slots=True)
class _CodedGrid:
    """The grid of codes that will be entropy coded: see `Grid`.

    Attributes:
        scales: one scale for each output.
    """

    scales: Scales

    @property
    def levels(self) -> Levels:
        return Levels(least=-LARGEST_CODE, largest=LARGEST_CODE)

    def by_input(self, d_in: int, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        return self.scales.by_input(d_in, dtype)

    def shifted(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        return weight

    def rounded(self, codes: Int8[Tensor, "d_in d_out"]) -> RoundedWeight:
        return RoundedWeight(codes=codes, scales=self.scales, entropy_coded=True)

    def rate(self, lengths: Float[Tensor, "255"], worth: Float[Tensor, " d_out"]) -> Rate:
        """Return what bits cost, given the length of each code and the error that a bit is worth for each output."""
        steps = self.scales.values(worth.dtype)[0]
        return Rate(lengths=lengths.to(worth), worth=worth / steps.square())
