"""Search of the scales of a block type, as it stores them, for rounding to nearest.

Real scales and minima of the groups are found first, then float16 numbers of the blocks under which the integers of
the groups represent them best, then integers next to those. What counts is always the weighted error of the rounded
weight, Σ_i h_i (w_i - w̃_i)².
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from rocket_core.linalg.block_codes import BlockScales, from_half, in_half
from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels import for_device
from rocket_core.sizes.block_types import BlockFormat

# Real scales that are tried per octave, down to this part of the one that represents the largest weight of a group.
_TRIES_PER_OCTAVE = 4
_LEAST_PART = 0.4
# Tries to each side of the best of them, up to halfway to the next.
_FINE_TRIES = 4
# Ranges that are tried for groups with minima, as parts of that of their weights; how much of what they leave out is at
# the lower end; and ranges that are tried to each side of the best of them, up to halfway to the next.
_RANGE_TRIES = 5
_MOST_SHORT, _MOST_BEYOND = 0.4, 0.05
_SHIFTS = (0.0, 0.5, 1.0)
_FINE_RANGES = 3
# Integers that the largest group of a block is given, as parts of the largest integer.
_PARTS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.75)
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """A weight by groups, to be rounded to nearest.

    Attributes:
        values: W.
        importance: h, with mean 1.
        format: the block type.
        sums: Σ h, Σ h w and Σ h w² of each group, in float64.
    """

    values: Float[Tensor, "groups size d_out"]
    importance: Float[Tensor, "groups size 1"]
    format: BlockFormat
    sums: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(
        cls, weight: Float[Tensor, "d_in d_out"], importance: Float[Tensor, " d_in"], form: BlockFormat
    ) -> "_Groups":
        """Return the groups of a weight, whose rows are whole blocks."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        values = weight.to(wide).reshape(-1, form.group_size, weight.shape[1])
        weights = (importance / importance.mean().clamp_min(_TINY)).view(-1, form.group_size, 1)
        weighted = values * weights
        sums = (
            weights.sum(dim=1, dtype=torch.float64),
            weighted.sum(dim=1, dtype=torch.float64),
            (weighted * values).sum(dim=1, dtype=torch.float64),
        )
        return cls(values=values, importance=weights, format=form, sums=sums)

    def moments(
        self,
        levels: tuple[int, ...],
        steps: Float[Tensor, "groups d_out"],
        offsets: Float[Tensor, "groups d_out"] | None,
    ) -> Float64[Tensor, "3 groups d_out"]:
        """Return Σ h c², Σ h c and Σ h c w of each group, with the codes c that these steps and offsets give."""
        kernels = for_device(self.values.device)
        return kernels.code_moments(self.values, self.importance, steps, offsets, Levels.of(levels))

    def errors_of(
        self, moments: Float64[Tensor, "3 groups d_out"], steps: Tensor, offsets: Tensor | None
    ) -> Float64[Tensor, "groups d_out"]:
        """Return Σ h (s c - o - w)² of each group."""
        (second, mean, mixed), (total, first, energy) = moments, self.sums
        steps = steps.double()
        errors: Tensor = steps * (steps * second - 2 * mixed) + energy
        if offsets is not None:
            offsets = offsets.double()
            errors = errors + offsets * (offsets * total + 2 * (first - steps * mean))
        return errors

    def errors(
        self, steps: Float[Tensor, "groups d_out"], offsets: Float[Tensor, "groups d_out"] | None
    ) -> Float64[Tensor, "groups d_out"]:
        """Return the error of each group with these steps and offsets."""
        return self.errors_of(self.moments(self.format.multiples, steps, offsets), steps, offsets)

    def over_blocks(self, per_group: Shaped[Tensor, "groups d_out"]) -> Shaped[Tensor, "blocks per_block d_out"]:
        """Return numbers of groups by their blocks."""
        return per_group.view(-1, self.format.groups_per_block, per_group.shape[1])

    def by_group(self, per_block: Shaped[Tensor, "blocks d_out"]) -> Shaped[Tensor, "groups d_out"]:
        """Repeat numbers of blocks for each of their groups."""
        return per_block.repeat_interleave(self.format.groups_per_block, dim=0)


def search_block_scales(
    weight: Float[Tensor, "d_in d_out"], importance: Float[Tensor, " d_in"], block_format: BlockFormat
) -> BlockScales:
    """Return scales that a block type can store, with a small Σ_i h_i (w_i - w̃_i)², every w̃_i rounded to nearest.

    Outputs share nothing: those of a part of the outputs are the same.

    Args:
        weight: W, whose rows are whole blocks.
        importance: h, >= 0, for instance the diagonal of the Gram matrix.
        block_format: the block type.
    """
    block_format = block_format.of_row(len(weight))
    groups = _Groups.of(weight, importance, block_format)
    real, minima = _real_scales_and_minima(groups) if block_format.has_minima else (_real_scales(groups), None)
    halves, integers = _shared(
        groups, real, _scale_ends(block_format), whole_scales, lambda steps: groups.errors(steps, minima)
    )
    half_minima = integer_minima = None
    if minima is not None:
        steps = integers * groups.by_group(halves.to(real.dtype))
        ends = (block_format.largest_minimum,)
        half_minima, integer_minima = _shared(
            groups, minima, ends, whole_minima, lambda offsets: groups.errors(steps, offsets)
        )
    integers, polished = _polished(groups, halves, integers, half_minima, integer_minima)
    return BlockScales(
        block_scales=halves,
        group_scales=integers.to(torch.int8),
        block_minima=half_minima,
        group_minima=None if minima is None else polished.to(torch.int8),
        format=block_format,
    )


def _real_scales(groups: _Groups) -> Float[Tensor, "groups d_out"]:
    """Return the best real scale of each group among tries of both signs, each with its least-squares refinement.

    Positive scales are those that can be stored, which may be far apart.
    """
    levels, positive = groups.format.levels, groups.format.positive
    largest = groups.values.abs().amax(dim=1).clamp_min_(_TINY) / max(-levels[0], levels[-1])
    best, least = largest.clone(), _no_errors_yet(largest)

    def storable(scales: Float[Tensor, "groups d_out"]) -> Float[Tensor, "groups d_out"]:
        return from_half(in_half(scales, groups.format), groups.format, scales.dtype) if positive else scales

    def attempt(tried: Float[Tensor, "groups d_out"]) -> None:
        nonlocal best, least
        tried = storable(tried)
        moments = groups.moments(levels, tried, None)
        fitted = storable(torch.where(moments[0] > 0, moments[2] / moments[0], tried).to(tried.dtype))
        error = groups.errors_of(moments, fitted, None)
        better = (error < least) & (fitted != 0)
        least, best = torch.where(better, error, least), torch.where(better, fitted, best)

    for step in range(math.ceil(-math.log2(_LEAST_PART) * _TRIES_PER_OCTAVE) + 1):
        for sign in (1,) if positive else (1, -1):
            attempt(largest * (sign * 2.0 ** (-step / _TRIES_PER_OCTAVE)))
    coarse = best
    for step in range(1, _FINE_TRIES + 1):
        for direction in (1, -1):
            attempt(coarse * 2.0 ** (direction * step / (_TRIES_PER_OCTAVE * 2 * _FINE_TRIES)))
    return best


def _shared(
    groups: _Groups,
    real: Float[Tensor, "groups d_out"],
    ends: tuple[int, ...],
    whole: Callable[[Tensor, BlockFormat], Tensor],
    errors: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, "blocks d_out"], Float[Tensor, "groups d_out"]]:
    """Return float16 numbers of blocks and integers of groups whose products replace real numbers of groups best.

    Args:
        groups: the weight.
        real: the numbers.
        ends: integers that the largest number of a block may get; also tried are smaller ones.
        whole: rounds to the integers that can be stored.
        errors: error of each group, given the products.
    """
    by_block = groups.over_blocks(real)
    greatest = by_block.gather(1, by_block.abs().argmax(dim=1, keepdim=True))[:, 0]
    best_halves = in_half(greatest / ends[0], groups.format)
    best_integers = torch.ones_like(real)
    least = _no_errors_yet(greatest)
    for integer in dict.fromkeys(round(part * end) for part in _PARTS for end in ends):
        halves = in_half(greatest / integer, groups.format)
        exact = groups.by_group(from_half(halves, groups.format, real.dtype))
        integers = whole(real / exact, groups.format)
        error = groups.over_blocks(errors(integers * exact)).sum(dim=1)
        better = error < least
        least, best_halves = torch.where(better, error, least), torch.where(better, halves, best_halves)
        best_integers = torch.where(groups.by_group(better), integers, best_integers)
    return best_halves, best_integers


def _scale_ends(block_format: BlockFormat) -> tuple[int, ...]:
    smallest, largest = block_format.scales
    return (smallest, largest) if smallest < 0 else (largest,)


def whole_scales(values: Float[Tensor, "*shape"], block_format: BlockFormat) -> Float[Tensor, "*shape"]:
    """Round to the nearest s, which is not zero."""
    rounded = values.round().clamp_(*block_format.scales)
    return torch.where(rounded == 0, torch.ones_like(values).copysign(values), rounded)


def whole_minima(values: Float[Tensor, "*shape"], block_format: BlockFormat) -> Float[Tensor, "*shape"]:
    """Round to the nearest m."""
    least = 0 if block_format.groups_per_block > 1 else 1
    return values.round().clamp_(least, block_format.largest_minimum)


def _polished(
    groups: _Groups,
    halves: Float[Tensor, "blocks d_out"],
    integers: Float[Tensor, "groups d_out"],
    half_minima: Float[Tensor, "blocks d_out"] | None,
    minima: Float[Tensor, "groups d_out"] | None,
) -> tuple[Float[Tensor, "groups d_out"], Float[Tensor, "groups d_out"]]:
    """Return s and m after trying their neighbours; m is zero without minima."""
    exact = groups.by_group(halves.to(integers.dtype))
    scale_of_minima = None if half_minima is None else groups.by_group(half_minima.to(integers.dtype))
    best = integers, torch.zeros_like(integers) if minima is None else minima
    if groups.format.groups_per_block == 1:
        return best
    changes = (-1, 0, 1) if groups.format.has_minima else (0,)
    least = _no_errors_yet(integers)
    for change, change_of_minimum in itertools.product((0, -1, 1), changes):
        scale = whole_scales(integers + change, groups.format)
        minimum = best[1] if minima is None else whole_minima(minima + change_of_minimum, groups.format)
        error = groups.errors(scale * exact, None if scale_of_minima is None else minimum * scale_of_minima)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best[0]), torch.where(better, minimum, best[1])
    return best


def _real_scales_and_minima(
    groups: _Groups,
) -> tuple[Float[Tensor, "groups d_out"], Float[Tensor, "groups d_out"]]:
    """Return the best real step and offset of each group; steps are positive, and offsets that share e not negative."""
    values, most = groups.values, groups.format.multiples[-1]
    high, low = values.amax(dim=1), values.amin(dim=1)
    shared = groups.format.groups_per_block > 1
    if shared:
        low = low.clamp_max(0)
    span = (high - low).clamp_min_(_TINY)
    total, first, _ = groups.sums
    best, offset, least = span / most, -low, _no_errors_yet(span)
    best_part, best_shift = torch.ones_like(span), torch.zeros_like(span)

    def attempt(part: Tensor, shift: Tensor) -> None:
        nonlocal best, offset, least, best_part, best_shift
        step, start = span * part / most, -low - shift * span * (1 - part)
        moments = groups.moments(groups.format.multiples, step, start)
        second, mean, mixed = moments
        determinant = total * second - mean * mean
        fits = determinant > 1e-6 * total * second
        fitted = torch.where(fits, (total * mixed - mean * first) / determinant, step)
        start = torch.where(fits, (mean * mixed - second * first) / determinant, start)
        if shared:
            # A minimum above zero cannot be stored.
            above = start < 0
            fitted = torch.where(above & (second > 0), mixed / second, fitted)
            start = start.clamp_min(0)
        fitted, start = torch.where(fitted > 0, fitted, span / most).to(span.dtype), start.to(span.dtype)
        error = groups.errors_of(moments, fitted, start)
        better = error < least
        least = torch.where(better, error, least)
        best, offset = torch.where(better, fitted, best), torch.where(better, start, offset)
        best_part, best_shift = torch.where(better, part, best_part), torch.where(better, shift, best_shift)

    width = (_MOST_SHORT + _MOST_BEYOND) / _RANGE_TRIES
    for number in range(_RANGE_TRIES + 1):
        for shift in _SHIFTS:
            attempt(span.new_tensor(1 + _MOST_BEYOND - width * number), span.new_tensor(shift))
    coarse, its_shift = best_part, best_shift
    for number in range(1, _FINE_RANGES + 1):
        for direction in (1, -1):
            attempt(coarse + direction * number * width / (2 * _FINE_RANGES), its_shift)
    return best, offset


def _no_errors_yet(like: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    return torch.full_like(like, math.inf, dtype=torch.float64)
