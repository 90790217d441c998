"""Gram matrices, summed over batches of rows."""

import torch
from jaxtyping import Float
from torch import Tensor

# A Gram matrix is symmetric: this many of its rows at a time, from the diagonal on, take little more than half of the
# products. Fewer would not occupy a CPU.
_STRIP = 256


def add_gram(total: Float[Tensor, "d_in d_in"] | None, rows: Float[Tensor, "rows d_in"]) -> Float[Tensor, "d_in d_in"]:
    """Add XᵀX to a sum in float64, of which only the diagonal and what is above it are valid until `symmetric`.

    Args:
        total: the sum so far, which is changed; None for zero.
        rows: X; products are computed in its dtype.

    Returns:
        The new sum.
    """
    width = rows.shape[1]
    if total is None:
        total = rows.new_zeros((width, width), dtype=torch.float64)
    if rows.device.type != "cpu":
        return total.add_(rows.mT @ rows)
    for begin in range(0, width, _STRIP):
        total[begin : begin + _STRIP, begin:] += rows[:, begin : begin + _STRIP].mT @ rows[:, begin:]
    return total


def symmetric(total: Float[Tensor, "d_in d_in"]) -> Float[Tensor, "d_in d_in"]:
    """Copy what is above the diagonal of a sum below it, in place, and return the sum."""
    for begin in range(0, len(total) if total.device.type == "cpu" else 0, _STRIP):
        end = begin + _STRIP
        total[end:, begin:end] = total[begin:end, end:].mT
    return total


def gram_matrix(rows: Float[Tensor, "rows d_in"]) -> Float[Tensor, "d_in d_in"]:
    """Return XᵀX in float64, from products in the dtype of X."""
    return symmetric(add_gram(None, rows))
