"""Rounding of a weight to integer codes, with the least error of the layer's output.

Pure functions of tensors. With G the Gram matrix of the inputs, the error of a rounded weight W̃ is
(w_j - w̃_j)ᵀG(w_j - w̃_j) for each output j. Outputs share nothing: weights of outputs do not change the result, and a
sample of outputs has the errors that it has among all.

References:
    Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2022.
    Behdin et al., "QuantEase: optimization-based quantization for language models", 2023.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rocket_core.linalg.blocked_factors import factor_in_place, invert_triangle_in_place
from rocket_core.linalg.code_grids import Grid, RoundedCodes, RoundedT
from rocket_core.linalg.integer_codes import RoundedWeight, Scales, by_group, search_scales
from rocket_core.linalg.kernels import for_device
from rocket_core.linalg.kernels.rate import Rate
from rocket_core.linalg.least_squares import UnitGram, output_errors
from rocket_core.linalg.rough_products import rough_products
from rocket_core.sizes.code_format import CodeFormat

# Added to the diagonal of G, as a part of its mean. Between 0.001 and 0.01 the result hardly changes.
_DAMPING = 0.003
# Inputs from which on rounding the factors of a product saves time. It changes errors by 1e-5 of themselves.
_ROUGH_FROM = 256
# Iterations of splitting; nearly all of the gain is in the first half.
_TURNS = 24
# Most visits to a code; all but a few codes of a few outputs are at their best after half of them.
_SWEEPS = 16
# Pull of refitted scales towards the scales before, as a part of their mean curvature. Keeps scales of groups with few
# nonzero codes in place.
_RIDGE = 1e-3
# Numbers in the systems of equations for scales that are solved at once, and in a product for their coefficients: what
# a cache holds.
_SYSTEMS, _PRODUCT = 2**24, 2**21


@dataclass(frozen=True, kw_only=True)
class RoundingGram:
    """A Gram matrix prepared for rounding; one serves all layers that read the same input, and all formats.

    Attributes:
        matrix: G with a damped diagonal, > 0 also for inputs that never fire.
        added: what the damping added to the diagonal.
        order: inputs by falling diagonal, the order of rounding.
    """

    matrix: Float[Tensor, "n n"]
    added: Float[Tensor, " n"]
    order: Int64[Tensor, " n"]

    @classmethod
    def of(cls, gram: Float[Tensor, "n n"], *, damping: float = _DAMPING) -> "RoundingGram":
        """Damp a Gram matrix.

        Args:
            gram: symmetric, positive semidefinite up to rounding, in the dtype to compute in.
            damping: what is added to the diagonal, as a part of its mean, > 0.
        """
        diagonal = gram.diagonal()
        fires = diagonal > 0
        number = fires.sum()
        total = torch.where(fires, diagonal, 0).sum()
        mean = torch.where(number > 0, total / number, 1).double()
        added = torch.where(fires, damping * mean, mean).to(gram.dtype)
        damped = gram.clone()
        damped.diagonal().add_(added)
        return cls(matrix=damped, added=added, order=damped.diagonal().argsort(descending=True, stable=True))

    @cached_property
    def factor(self) -> Float[Tensor, "n n"]:
        """U with UᵀU = G⁻¹ in the order of rounding, upper triangular; costs 2n³ / 3 in float64.

        Raises:
            torch.linalg.LinAlgError: the matrix is not positive definite.
        """
        # With J the reversal of the order and JGJ = LLᵀ, U is JL⁻¹J.
        backwards = self.order.flip(0)
        matrix = self.matrix.index_select(0, backwards).index_select(1, backwards).double()
        if not factor_in_place(matrix):
            raise torch.linalg.LinAlgError("a damped Gram matrix is not positive definite")  # type: ignore[attr-defined]
        invert_triangle_in_place(matrix)
        return matrix.to(self.matrix.dtype).flip(0, 1)

    @cached_property
    def least_removal(self) -> Float[Tensor, " n"]:
        """For each input what removing an entry of 1 adds to the error under G, if all other entries are refitted.

        1 / [(G + damping)⁻¹]_ii, less what the damping adds for the entry itself, >= 0.

        References:
            Hassibi and Stork, "Optimal brain surgeon", 1993.
        """
        inverse = torch.empty_like(self.added).index_copy_(0, self.order, self.factor.square().sum(dim=0))
        return (1 / inverse - self.added).clamp_min_(0)

    @cached_property
    def unit(self) -> UnitGram:
        """The matrix for inputs of unit length."""
        return UnitGram.of(self.matrix)

    def errors(self, difference: Float[Tensor, "n columns"]) -> Float[Tensor, " columns"]:
        """Return dᵀGd of each column d, in float64."""
        return output_errors(self.matrix, difference)

    def slope(self, weight: Float[Tensor, "n columns"], rounded: RoundedCodes) -> Float[Tensor, "n columns"]:
        """Return G(W - W̃), which tells how the error changes with each entry."""
        return self.matrix @ (weight - rounded.weight(weight.dtype))

    def undamped(
        self, errors: Float[Tensor, " columns"], difference: Float[Tensor, "n columns"]
    ) -> Float[Tensor, " columns"]:
        """Return the errors of columns under G itself, in float64, given those under the damped matrix.

        On layers of SmolLM2-135M in float32 within 3e-7 of their sum, which a product with G needs n times as long for.
        """
        return (errors - (difference.square() * self.added[:, None]).sum(dim=0, dtype=torch.float64)).clamp_min(0)


def round_weight(
    weight: Float[Tensor, "d_in d_out"],
    gram: RoundingGram,
    code_format: CodeFormat,
    *,
    splitting: bool = True,
    exponent: int | None = None,
) -> tuple[RoundedWeight, Float[Tensor, " d_out"]]:
    """Round a weight: the better of GPTQ and splitting for each output, coordinate descent, and a refit of the scales.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        code_format: how to store the weight.
        splitting: also try splitting, which doubles the time. It matters below 4 bits.
        exponent: see `search_scales`.

    Returns:
        The rounding, and the error of each output under the damped matrix, in float64.
    """
    scales = search_scales(weight, gram.matrix.diagonal(), code_format, exponent=exponent)
    rounded = start(weight, gram, scales, splitting=splitting)
    slope = gram.slope(weight, rounded)
    first = descend(weight, gram, rounded, slope)
    errors = errors_from(slope, weight, first)
    refitted = refit_scales(gram, first, slope)
    slope = gram.slope(weight, refitted)
    second = descend(weight, gram, refitted, slope)
    others = errors_from(slope, weight, second)
    return first.replaced(second, others < errors), torch.minimum(others, errors)


def start(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, scales: Grid[RoundedT], *, splitting: bool
) -> RoundedT:
    """Round by GPTQ and, if asked to, by splitting, and return the better for each output."""
    rounded, errors = gptq_and_errors(weight, gram, scales)
    if not splitting:
        return rounded
    other, others = split(weight, gram, scales)
    return rounded.replaced(other, others < errors)


def round_to_nearest(weight: Float[Tensor, "d_in d_out"], scales: Grid[RoundedT]) -> RoundedT:
    """Round every entry by itself."""
    codes = scales.levels.nearest(scales.shifted(weight) / scales.by_input(len(weight), weight.dtype))
    return scales.rounded(codes.to(scales.levels.dtype))


def gptq(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, scales: Grid[RoundedT], rate: Rate | None = None
) -> RoundedT:
    """Round input by input, so that inputs which are not rounded yet compensate each error; see `gptq_and_errors`."""
    rounded: RoundedT = gptq_and_errors(weight, gram, scales, rate)[0]
    return rounded


def gptq_and_errors(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, scales: Grid[RoundedT], rate: Rate | None = None
) -> tuple[RoundedT, Float[Tensor, " d_out"]]:
    """Round input by input, and let the inputs that are not rounded yet compensate each error.

    Inputs are rounded by falling energy; the scales, which were found before, stay. Costs n²m, and n³ for the factor of
    `gram`.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        scales: scale of each group and output.
        rate: what bits cost, if codes are to be entropy coded.

    Returns:
        The rounding, and the error of each output under the damped matrix, in float64: Σ_i (e_i / U_ii)², e_i what is
        rounded away of input i after it has compensated those before.

    References:
        Frantar et al., 2022, with static groups and activation order.
    """
    order, factor, kernels = gram.order, gram.factor, for_device(weight.device)
    rest = scales.shifted(weight)[order]
    steps = scales.by_input(len(weight), weight.dtype)[order]
    codes = torch.empty_like(rest)
    size = kernels.BLOCK
    for end in range(size, len(rest) + size, size):
        own = slice(end - size, end)
        rest[own] = kernels.round_block(rest[own], codes[own], factor[own, own], steps[own], scales.levels, rate)
        # The errors of the last 1, 2, 4 ... blocks change as many later ones at once, by products of large matrices.
        blocks = end // size
        span = size * (blocks & -blocks)
        before, after = slice(end - span, end), slice(end, end + span)
        with rough_products(weight.device) if span >= _ROUGH_FROM else nullcontext():
            rest[after].addmm_(factor[before, after].mT, rest[before], alpha=-1)
    stored = torch.empty_like(codes, dtype=scales.levels.dtype)
    stored[order] = codes.to(stored.dtype)
    return scales.rounded(stored), rest.square_().sum(dim=0, dtype=torch.float64)


def split(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, scales: Grid[RoundedT]
) -> tuple[RoundedT, Float[Tensor, " d_out"]]:
    """Round by splitting: a dense X near the minimiser and a rounded Z are pulled towards each other.

    Each output takes the best Z that was seen. No order of inputs is fixed, unlike in `gptq`.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        scales: scale of each group and output.

    Returns:
        The rounding, and the error of each output under the damped matrix, in float64.

    References:
        Boyd et al., "Distributed optimization and statistical learning via the alternating direction method of
        multipliers", 2011, section 9.1.
    """
    unit, levels = gram.unit, scales.levels
    lengths = unit.lengths[:, None]
    steps = scales.by_input(len(weight), weight.dtype) * lengths
    target = scales.shifted(weight) * lengths
    resolvent = unit.resolvent(unit.mean_eigenvalue or 1.0)
    codes = levels.nearest_(target / steps)
    cut = torch.zeros_like(target)
    best, least = codes, output_errors(unit.matrix, target - codes * steps)
    for _ in range(_TURNS):
        # X, plus what was cut from Z before.
        cut += target + resolvent @ (codes * steps - cut - target)
        codes = levels.nearest_(cut / steps)
        rounded = codes * steps
        cut -= rounded
        errors = output_errors(unit.matrix, target - rounded)
        best = torch.where(errors < least, codes, best)
        least = torch.minimum(errors, least)
    return scales.rounded(best.to(levels.dtype)), least


def improve(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, rounded: RoundedT, *, sweeps: int = _SWEEPS
) -> RoundedT:
    """Reduce the error by changing one code of each output at a time; see `descend`."""
    return descend(weight, gram, rounded, gram.slope(weight, rounded), sweeps=sweeps)


def descend(
    weight: Float[Tensor, "d_in d_out"],
    gram: RoundingGram,
    rounded: RoundedT,
    slope: Float[Tensor, "d_in d_out"],
    *,
    grid: Grid[RoundedT] | None = None,
    rate: Rate | None = None,
    sweeps: int = _SWEEPS,
) -> RoundedT:
    """Reduce the error by changing one code of each output at a time; it never increases.

    The best value of an entry, given all others, is w̃_ij + (G(w_j - w̃_j))_i / G_ii; it is rounded to the nearest code.
    A sweep costs nm comparisons, and n for each code that changes: 3 to 10 % of all after `gptq`.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        rounded: the rounding to start from.
        slope: its `RoundingGram.slope`, which becomes that of the result.
        grid: what codes can be; the scales of the rounding if None.
        rate: what bits cost, if codes are to be entropy coded; the error plus their cost is then what decreases.
        sweeps: most visits to every entry; fewer if codes stop changing.

    References:
        Behdin et al., 2023.
    """
    points: Grid[RoundedT] = rounded.scales if grid is None else grid
    steps, codes = points.by_input(len(weight), weight.dtype), rounded.codes.to(weight.dtype)
    for_device(weight.device).descend(codes, slope, gram.matrix, steps, gram.order, points.levels, rate, sweeps)
    return points.rounded(codes.to(points.levels.dtype))


def errors_from(
    slope: Float[Tensor, "d_in d_out"], weight: Float[Tensor, "d_in d_out"], rounded: RoundedCodes
) -> Float[Tensor, " d_out"]:
    """Return the error of each output under the damped matrix, in float64, given its `RoundingGram.slope`."""
    return (weight - rounded.weight(weight.dtype)).mul_(slope).sum(dim=0, dtype=torch.float64)


def refit_scales(gram: RoundingGram, rounded: RoundedWeight, slope: Float[Tensor, "d_in d_out"]) -> RoundedWeight:
    """Return the same codes with the scales that minimise the error, rounded to what can be stored.

    The scales of an output solve one system of equations; groups whose codes hardly matter keep theirs. Costs n²m / 2
    for the coefficients of all systems, and (n / group_size)³ m to solve them.

    Args:
        gram: prepared Gram matrix, in the dtype of the slope.
        rounded: codes, and the scales to start from.
        slope: its `RoundingGram.slope`.
    """
    code_format, before = rounded.scales.format, rounded.scales.values(slope.dtype)
    (groups, d_out), size = before.shape, code_format.group_size
    found = torch.empty_like(before)
    width = max(1, min(_SYSTEMS // groups**2, _PRODUCT // len(slope)))
    for begin in range(0, d_out, width):
        columns = slice(begin, begin + width)
        codes = rounded.codes[:, columns].to(slope.dtype)
        grouped = by_group(codes, code_format)
        system = codes.new_empty(codes.shape[1], groups, groups)
        for group in range(groups):
            # The system is symmetric, so what is above its diagonal is copied from below.
            first = group * size
            product = by_group(gram.matrix[first:, first : first + size] @ codes[first : first + size], code_format)
            system[:, group:, group] = product.mul_(grouped[group:]).sum(dim=1).mT
            system[:, group, group:] = system[:, group:, group]
        missing = (by_group(slope[:, columns], code_format) * grouped).sum(dim=1).mT
        ridge = _RIDGE * system.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None].clamp_min(torch.finfo(codes.dtype).tiny)
        system.diagonal(dim1=1, dim2=2).add_(ridge)
        found[:, columns] = before[:, columns] + torch.linalg.solve(system, missing[:, :, None])[:, :, 0].mT
    return RoundedWeight(
        codes=rounded.codes,
        # A scale that became zero would take the meaning from its codes.
        scales=Scales.nearest(torch.where(found == 0, before, found), rounded.scales.exponent, code_format),
    )
