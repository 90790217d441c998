"""Pruning in one pass over the inputs, in which the entries not reached yet compensate for what is removed.

Pure functions of tensors.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.linalg.least_squares import largest

COMPENSATION_BLOCK = 128
"""Inputs among which entries are compared; later inputs are corrected for their removal by one matrix product."""

# Added to the diagonal of G, as a part of its mean, as in the authors' program.
_DAMPING = 0.01


def prune_with_compensation(
    weight: Float[Tensor, "d_in d_out"], gram: Float[Tensor, "d_in d_in"], count: int
) -> tuple[Float[Tensor, "d_in d_out"], Bool[Tensor, "d_in d_out"]]:
    """Prune as SparseGPT does.

    Inputs are visited in their order. In each block of `COMPENSATION_BLOCK` of them the entries with the smallest
    w² / [H⁻¹]_ii are removed, where H is the damped G of this and all later inputs: the error that is left once the
    later entries have their least-squares values. They get these values after each input.

    Args:
        weight: W, in the dtype to compute in.
        gram: G, symmetric, positive semidefinite up to rounding; inputs that never fire lose all their entries.
        count: entries to keep, 1 to `weight.numel()`; every block keeps the same part of its entries.

    Returns:
        The pruned weight, and which entries are kept.

    Raises:
        torch.linalg.LinAlgError: the damped matrix is not positive definite.

    References:
        Frantar and Alistarh, "SparseGPT: massive language models can be accurately pruned in one-shot", 2023,
        algorithm 1, with its adaptive mask.
    """
    d_in, d_out = weight.shape
    factor, fires = _inverse_factor(gram)
    current = weight.masked_fill(~fires[:, None], 0)
    support = torch.zeros_like(weight, dtype=torch.bool)
    for start in range(0, d_in, COMPENSATION_BLOCK):
        stop = min(start + COMPENSATION_BLOCK, d_in)
        pivots = factor.diagonal()[start:stop]
        scores = (current[start:stop] / pivots[:, None]).square()
        kept = largest(scores, round(count * stop / d_in) - round(count * start / d_in))
        support[start:stop] = kept
        scaled_errors = torch.empty(stop - start, d_out, dtype=weight.dtype, device=weight.device)
        for at, row in enumerate(range(start, stop)):
            error = current[row].masked_fill(kept[at], 0) / pivots[at]
            current[row:stop] -= torch.outer(factor[row, row:stop], error)
            scaled_errors[at] = error
        current[stop:] -= factor[start:stop, stop:].T @ scaled_errors
    return current.masked_fill(~support, 0), support


def _inverse_factor(gram: Float[Tensor, "n n"]) -> tuple[Float[Tensor, "n n"], Bool[Tensor, " n"]]:
    """Return U with UᵀU = H⁻¹, upper triangular, computed in float64; and which inputs fire."""
    fires = gram.diagonal() > 0
    damped = gram.double() + torch.diag((~fires).double())
    damped = damped + _DAMPING * damped.diagonal().mean() * torch.eye(
        len(gram), dtype=torch.float64, device=gram.device
    )
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).to(gram.dtype), fires
