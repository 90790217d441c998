"""Memory needed to compress a single layer, or to quantize token embedding and head, from shapes. Loads no torch."""

from collections import Counter
from collections.abc import Sequence

from rocket_core.sizes.budget import Shape

_FLOAT64 = 8
# eigh holds its input, the vectors and two workspaces of the same size.
_EIGH_COPIES = 4
# Matrices of a weight's size that rounding holds: weight, steps, codes, slopes, errors, and candidates of each.
_ROUNDING_COPIES = 12
# Bytes on disk of a code of at most 8 bits, with its part of a scale.
_CODE_BYTES = 2
# Bytes of memory for each code: itself, and copies while it is packed or unpacked.
_CODE_BYTES_IN_MEMORY = 8
# The matrix itself, damped, in order and inverted.
_GRAM_COPIES = 4

OUTPUTS_AT_ONCE = 2**14
"""Outputs that are rounded at once: more, as those of a large vocabulary, would only take memory."""


def gram_bytes(shape: Shape, *, input_grams: bool) -> int:
    """Return the bytes of a layer's Gram matrix.

    Args:
        shape: `(d_in, d_out)`.
        input_grams: whether it is that of the input, even if that of the output is smaller.
    """
    side = shape[0] if input_grams else min(shape)
    return side**2 * _FLOAT64


def block_gram_bytes(block: Sequence[Shape], *, input_grams: bool) -> int:
    """Return the bytes of the Gram matrices of a block's layers.

    Layers that read the same input share one. Which ones do is not known from shapes, except for a gate and what it
    multiplies, in a block or in each of its experts: two layers of one shape for each that has its sides exchanged.

    Args:
        block: `(d_in, d_out)` of its layers.
        input_grams: as in `gram_bytes`.
    """
    counts = Counter(block)
    gates = {
        (d_in, d_out): counts[d_out, d_in]
        for d_in, d_out in counts
        if input_grams and counts[d_in, d_out] == 2 * counts[d_out, d_in]
    }
    return sum(
        (count - gates.get(shape, 0)) * gram_bytes(shape, input_grams=input_grams) for shape, count in counts.items()
    )


def held_out_tokens(tokens: int) -> int:
    """Return how many of all weighted calibration tokens losses are estimated on, instead of being summed.

    So many are enough for their gradients, which differ by orders of magnitude, and no more than an eighth of all.
    """
    return min(2048, tokens // 8)


def solver_bytes(shape: Shape, *, itemsize: int, input_grams: bool, rounds: bool = False) -> int:
    """Return the bytes needed to profile and compress a layer, in addition to its Gram matrix.

    Args:
        shape: `(d_in, d_out)`.
        itemsize: bytes of a number in supports and least squares.
        input_grams: whether the Gram matrix of the input is used.
        rounds: whether its weight may be rounded to integer codes.
    """
    d_in, d_out = shape
    side, numbers = min(shape), d_in * d_out
    # The Gram matrix in the computing precision, as it is and for inputs of unit length; for rounding damped, and a
    # factor of its inverse.
    matrices = 4 if rounds else 2
    prepared = matrices * d_in**2 * itemsize if input_grams else 0
    # In float64: the Gram matrix after shrinkage, the weight, its product with that or with a factor of it; if its
    # inputs are the smaller side, it is projected as well.
    weights = 2 if d_out <= d_in else 4
    basis = (_EIGH_COPIES * side**2 + weights * numbers + d_in**2) * _FLOAT64
    # A candidate: coefficients, support scores and two products, at the full rank; next to the weight and its basis.
    candidate = (3 * side * d_out + 3 * side**2 + 3 * numbers) * itemsize
    # Splitting: a resolvent and its factor; target, both parts, support, scratch, products and scores.
    splitting = (2 * d_in**2 + 7 * numbers) * itemsize if input_grams else 0
    return prepared + max(basis, candidate, splitting)


def target_bytes(shape: Shape) -> int:
    """Return the bytes needed to find the target of a layer in sequential compression, without its sums.

    In float64: the shrunk Gram matrix and its factor; weight, products, right side, solution and target.

    Args:
        shape: `(d_in, d_out)`.
    """
    d_in, d_out = shape
    return (2 * d_in**2 + 5 * d_in * d_out) * _FLOAT64


def table_memory_bytes(parameters: int, hidden_size: int, *, compute_itemsize: int, itemsize: int) -> int:
    """Return the memory to quantize a table: dense, as codes, with some outputs being rounded.

    Args:
        parameters: parameters of the table; those of everything outside the blocks are an upper bound.
        hidden_size: inputs of the table.
        compute_itemsize: bytes of a number of the model in memory.
        itemsize: bytes of a number while rounding.
    """
    rounding = min(parameters, OUTPUTS_AT_ONCE * hidden_size) * _ROUNDING_COPIES * itemsize
    grams = _GRAM_COPIES * hidden_size**2 * _FLOAT64
    return parameters * (compute_itemsize + _CODE_BYTES_IN_MEMORY) + rounding + grams


def table_disk_bytes(parameters: int, hidden_size: int) -> int:
    """Return the disk for the codes of all tables, and the Gram matrices of two; the arguments are as above."""
    return parameters * _CODE_BYTES + 2 * hidden_size**2 * _FLOAT64
