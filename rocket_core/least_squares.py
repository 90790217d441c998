"""Least squares on a fixed support: the exact best values of the coefficients that are kept.

Used for weights pruned in place (the Gram matrix is that of the layer's input) and for the coefficients of a
dictionary (the Gram matrix is that of its atoms).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# What a step may still gain, relative to the error that is left, when a solution counts as exact.
_TOLERANCE = 1e-6
_MOST_STEPS = 500


def solve_on_support(
    gram: Float[Tensor, "n n"],
    target: Float[Tensor, "n outputs"],
    support: Bool[Tensor, "n outputs"],
    *,
    energy: float,
    start: Float[Tensor, "n outputs"] | None = None,
    tolerance: float = _TOLERANCE,
) -> Float[Tensor, "n outputs"]:
    """Minimises E - 2·tr(XᵀB) + tr(XᵀGX) over matrices X that are zero outside a support; all columns at once.

    With SᵀS = G, B = GW and E = ‖SW‖² that is ‖S(W - X)‖². Same result as `torch.linalg.lstsq` on the kept rows of
    each column, by conjugate gradients preconditioned with the diagonal of G: a step costs one product with G for all
    columns, where a factorization per column would cost n³ each. Ends when a step can gain no more than `tolerance` of
    the error that is left; from a start nearby (a slightly larger support) a few steps suffice.

    Args:
        gram: G, symmetric, positive definite on every support.
        target: B.
        support: where X may be nonzero.
        energy: E, the error of X = 0.
        start: where the search begins; entries outside the support are ignored. None begins at zero.
        tolerance: gain of a step, relative to the error, at which it stops, > 0.

    Returns:
        X, in the dtype and on the device of `gram`.

    References:
        Hestenes and Stiefel, 1952; columns are independent systems with one matrix.
    """
    energies = gram.diagonal()[:, None]
    # An input that never fires has nothing to gain from any weight.
    scale = torch.where(energies > 0, energies.reciprocal(), 0)
    solution = torch.zeros_like(target) if start is None else start.masked_fill(~support, 0)
    residual = (target - gram @ solution).masked_fill(~support, 0)
    direction = residual * scale
    gain = (residual * direction).sum(dim=0)
    # XᵀB + Xᵀ(B - GX), as the residual is only cut off where X is zero.
    error = energy - float((solution * (target + residual)).sum(dtype=torch.float64))
    floor = torch.finfo(gram.dtype).eps * energy
    for _ in range(min(_MOST_STEPS, 2 * gram.shape[0])):
        if float(gain.sum(dtype=torch.float64)) <= tolerance * max(error, floor):
            break
        product = gram @ direction
        curvature = (direction * product).sum(dim=0)
        step = torch.where(curvature > 0, gain / curvature, 0)
        solution = solution + step * direction
        residual = (residual - step * product).masked_fill(~support, 0)
        preconditioned = residual * scale
        next_gain = (residual * preconditioned).sum(dim=0)
        direction = preconditioned + torch.where(gain > 0, next_gain / gain, 0) * direction
        error -= float((step * gain).sum(dtype=torch.float64))
        gain = next_gain
    return solution


def largest(scores: Float[Tensor, "rows columns"], count: int) -> Bool[Tensor, "rows columns"]:
    """Where the `count` largest scores of a matrix are; ties are broken by position.

    Args:
        scores: any finite numbers.
        count: 0 to `scores.numel()`.
    """
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    if count:
        chosen[scores.flatten().topk(count, sorted=False).indices] = True
    return chosen.view(scores.shape)
