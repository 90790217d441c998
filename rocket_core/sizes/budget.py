"""Parameters and bytes: the only place where ratio, rank and nnz are converted into one another."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

BudgetUnit = Literal["parameters", "bytes"]

Shape = tuple[int, int]
"""Rank and nnz of a factored layer."""


def parameter_budget(compressible_parameters: int, ratio: float) -> int:
    """Return the number of kept parameters allowed in total at a compression ratio.

    The largest integer not above `(1 - ratio) * compressible_parameters`, with the ratio read as the decimal that the
    user typed: 0.3 of 10 parameters leaves 7, not the 6 that binary floating point would give.

    Args:
        compressible_parameters: parameters of the selected linear layers, >= 0.
        ratio: fraction removed, [0, 1).
    """
    return math.floor(_kept_fraction(ratio) * compressible_parameters)


def bits_budget(parameters: int, bits: float) -> int:
    """Return the bytes allowed in total at a number of bits per weight, rounded down.

    Args:
        parameters: parameters of the selected linear layers when dense, >= 0.
        bits: bits per parameter, > 0, read as the decimal that the user typed.
    """
    return math.floor(Fraction(repr(bits)) * parameters / 8)


@lru_cache(maxsize=256)
def _kept_fraction(ratio: float) -> Fraction:
    return 1 - Fraction(repr(ratio))


def achieved_ratio(compressible_parameters: int, kept_parameters: int) -> float:
    """Return the fraction of the compressible parameters that was removed."""
    return 1 - kept_parameters / compressible_parameters


def kept_fraction(d_in: int, d_out: int, kept_parameters: int) -> float:
    """Return the fraction of a layer's parameters that is left."""
    return kept_parameters / (d_in * d_out)


def sparsity(rows: int, d_out: int, nnz: int) -> float:
    """Return the fraction of zeros among a layer's `rows * d_out` coefficients."""
    return 1 - nnz / (rows * d_out)


def remaining_parameters(model_parameters: int, compressible_parameters: int, kept_parameters: int) -> int:
    """Return the parameters of a whole model after compression."""
    return model_parameters - compressible_parameters + kept_parameters


def kept_parameters(d_in: int, rank: int, nnz: int) -> int:
    """Return the paper's count of a factored layer: the dense dictionary and the nonzero coefficients."""
    return rank * d_in + nnz


def rank_for(d_in: int, d_out: int, budget: int, rank_nnz_ratio: float, mask_cost: float = 0.0) -> int:
    """Return the rank at which dictionary and coefficients together use a layer's budget.

    Solves `rank * (d_in + d_out * (1 / rank_nnz_ratio + mask_cost)) = budget` and rounds down.

    Args:
        d_in: input features.
        d_out: output features.
        budget: kept parameters of this layer, or its bytes in units of one number.
        rank_nnz_ratio: atoms per nonzero of a coefficient column (the paper's k/s), >= 1.
        mask_cost: cost of one coefficient's mask bit, in the same unit.
    """
    return math.floor(budget / (d_in + d_out * (1 / rank_nnz_ratio + mask_cost)))


def nnz_for(d_in: int, d_out: int, budget: int, rank: int) -> int:
    """Return the nonzero coefficients that a budget leaves next to a dictionary of this rank, at most `rank * d_out`.

    Spending the budget to the last coefficient, instead of a whole number per column, lowers the error by 0.2-0.9 %
    and makes it unimodal in the rank. The result may be negative if the dictionary alone exceeds the budget.
    """
    return min(budget - rank * d_in, rank * d_out)


def candidate_shapes(
    d_in: int, d_out: int, ratio: float, rank_nnz_ratios: Sequence[float], *, itemsize: int | None = None
) -> list[Shape]:
    """Return shapes that use a layer's budget at a ratio to the last coefficient, by rising rank.

    Where the largest rank_nnz_ratios ask for more atoms than the eigenbasis has, the full basis with the remaining
    nonzeros is used instead.

    Args:
        d_in: input features.
        d_out: output features.
        ratio: compression ratio of the layer, (0, 1).
        rank_nnz_ratios: ascending, >= 1.
        itemsize: bytes per stored number if the ratio is one of bytes; None if it is one of parameters.
    """
    layer_budget = parameter_budget(d_in * d_out, ratio)
    full = min(d_in, d_out)
    if full < 1:
        return []
    mask_cost = 0.0 if itemsize is None else 1 / (8 * itemsize)
    ranks = dict.fromkeys(
        min(rank_for(d_in, d_out, layer_budget, value, 0.0 if value == 1 else mask_cost), full)
        for value in rank_nnz_ratios
    )
    shapes = [(rank, _affordable_nnz(d_in, d_out, layer_budget, rank, itemsize)) for rank in ranks if rank >= 1]
    # A coefficient matrix with fewer nonzeros than atoms has unused atoms.
    return [(rank, nnz) for rank, nnz in shapes if nnz >= rank]


def sparse_nnz(d_in: int, d_out: int, ratio: float, *, itemsize: int | None = None) -> int:
    """Return the nonzeros of a pruned weight at a ratio of its parameters, or of its bytes with the mask.

    The result may be negative.

    Args:
        d_in: input features.
        d_out: output features.
        ratio: compression ratio of the layer, (0, 1).
        itemsize: bytes per stored number if the ratio is one of bytes; None if it is one of parameters.
    """
    layer_budget = parameter_budget(d_in * d_out, ratio)
    return layer_budget if itemsize is None else layer_budget - math.ceil(mask_bytes(d_in, d_out) / itemsize)


def mask_bytes(rows: int, d_out: int) -> int:
    """Return the bytes of a mask: one bit per entry, with each output's bits padded to whole bytes."""
    return d_out * math.ceil(rows / 8)


def _affordable_nnz(d_in: int, d_out: int, layer_budget: int, rank: int, itemsize: int | None) -> int:
    nnz = nnz_for(d_in, d_out, layer_budget, rank)
    if itemsize is None or nnz == rank * d_out:
        return nnz
    return nnz_for(d_in, d_out, layer_budget - math.ceil(mask_bytes(rank, d_out) / itemsize), rank)


def factored_bytes(d_in: int, d_out: int, rank: int, nnz: int, itemsize: int) -> int:
    """Return the bytes of a factored layer on disk without its bias.

    Counted are the dictionary, the nonzero values, and the bit mask if the coefficients are sparse.

    Args:
        d_in: input features.
        d_out: output features.
        rank: number of atoms.
        nnz: nonzero coefficients.
        itemsize: bytes per stored number.
    """
    return dictionary_bytes(d_in, rank, itemsize) + coefficient_bytes(d_out, rank, nnz, itemsize)


def dictionary_bytes(d_in: int, rank: int, itemsize: int) -> int:
    """Return the bytes of a dictionary on disk; count it once for layers that share it."""
    return rank * d_in * itemsize


def coefficient_bytes(d_out: int, rank: int, nnz: int, itemsize: int) -> int:
    """Return the bytes of a factored layer on disk without its dictionary, as for a layer that shares another's."""
    return nnz * itemsize + (0 if nnz == rank * d_out else mask_bytes(rank, d_out))


def sparse_bytes(d_in: int, d_out: int, nnz: int, itemsize: int) -> int:
    """Return the bytes of a sparse layer on disk without its bias: nonzero values, and always the bit mask.

    Args:
        d_in: input features.
        d_out: output features.
        nnz: nonzero entries of the weight.
        itemsize: bytes per stored number.
    """
    return nnz * itemsize + mask_bytes(d_in, d_out)


def dense_bytes(d_in: int, d_out: int, itemsize: int) -> int:
    """Return the bytes of a dense layer on disk, without its bias."""
    return d_in * d_out * itemsize


def bits_per_weight(d_in: int, d_out: int, stored_bytes: int) -> float:
    """Return the bits on disk for each weight that a layer has when dense."""
    return 8 * stored_bytes / (d_in * d_out)


def quantized_bytes(d_in: int, d_out: int, bits: int, group_size: int, scale_bits: int) -> int:
    """Return the bytes of a quantized layer on disk without its bias: packed codes and scales.

    Args:
        d_in: input features.
        d_out: output features.
        bits: bits of a code.
        group_size: inputs that share a scale.
        scale_bits: bits of a scale: 16 for float16, 6 or 8 for a logarithmic scale.
    """
    return packed_bytes(d_in * d_out, bits) + scale_bytes(d_in, d_out, group_size, scale_bits)


def scale_bytes(d_in: int, d_out: int, group_size: int, scale_bits: int) -> int:
    """Return the bytes of the scales of a quantized layer; see `quantized_bytes`."""
    scales = d_out * -(-d_in // group_size)
    return 2 * scales if scale_bits == 16 else packed_bytes(scales, scale_bits)


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of n packed integers, of which every 8 fill `bits` bytes."""
    return -(-n // 8) * bits
