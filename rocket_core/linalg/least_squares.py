"""Least squares on a fixed support: the optimal values of the coefficients that are kept.

Used for weights pruned in place (the Gram matrix is that of the layer's input) and for the coefficients of a
dictionary (the Gram matrix is that of its atoms).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.linalg.blocked_factors import factor_in_place, invert_in_place

# A solution counts as exact if its error exceeds the minimum by no more than this, relative to the minimum.
_TOLERANCE = 1e-6
_MOST_STEPS = 500
# Added to the unit diagonal before inversion; larger values are tried if a smaller one fails.
_JITTERS = (1e-6, 1e-4, 1e-2)


@dataclass(frozen=True, kw_only=True)
class UnitGram:
    """A Gram matrix of inputs that are scaled to unit length.

    Attributes:
        matrix: has a unit diagonal, except that rows and columns of inputs that never fire are zero.
        lengths: lengths of the inputs; 1 for inputs that never fire.
        fires: 1 for inputs with nonzero length, else 0.
    """

    matrix: Float[Tensor, "n n"]
    lengths: Float[Tensor, " n"]
    fires: Float[Tensor, " n"]

    @classmethod
    def of(cls, gram: Float[Tensor, "n n"]) -> "UnitGram":
        """Scale a Gram matrix.

        Args:
            gram: symmetric, positive semidefinite up to rounding.
        """
        fires = gram.diagonal() > 0
        lengths = torch.where(fires, gram.diagonal().sqrt(), 1)
        return cls(matrix=(gram / lengths[:, None]).div_(lengths), lengths=lengths, fires=fires.to(gram.dtype))

    @cached_property
    def all_fire(self) -> bool:
        """Whether every input has a nonzero length."""
        return bool(self.fires.all())

    @cached_property
    def inverse(self) -> Float[Tensor, "n n"]:
        """The approximate inverse of the matrix; positive definite. Costs n³ in float64."""
        wide = self.matrix.double()
        ones = torch.where(wide.diagonal() > 0, 0.0, 1.0)
        for jitter in _JITTERS:
            factor, info = torch.linalg.cholesky_ex(_added(wide, ones + jitter))
            if int(info) == 0:
                return torch.cholesky_inverse(factor).to(self.matrix.dtype)
        # Any positive diagonal works as a preconditioner, but converges more slowly.
        return torch.eye(len(self.matrix), dtype=self.matrix.dtype, device=self.matrix.device)

    @cached_property
    def mean_eigenvalue(self) -> float:
        """The geometric mean of the matrix's eigenvalues, without inputs that never fire; costs n³ / 3.

        It is 1 for uncorrelated inputs, and decreases as more of their energy is concentrated in a few directions. If
        the factorization fails because of rounding, it is 0.
        """
        factor = _added(self.matrix, _JITTERS[0] + 1 - self.fires)
        if not factor_in_place(factor):
            return 0.0
        logarithms = 2 * factor.diagonal().double().log()
        return math.exp(float(logarithms.sum() / self.fires.sum().double().clamp_min(1)))

    def resolvent(self, pull: float) -> Float[Tensor, "n n"]:
        """Return p(G + pI)⁻¹ for a pull p > 0, large enough for the sum to be invertible; costs n³.

        Raises:
            torch.linalg.LinAlgError: the sum is not positive definite.
        """
        inverse = _added(self.matrix, torch.full_like(self.lengths, pull))
        if not factor_in_place(inverse):
            raise torch.linalg.LinAlgError(f"a Gram matrix with {pull:.3g} added is not positive definite")  # type: ignore[attr-defined]
        invert_in_place(inverse)
        return inverse.mul_(pull)


def _added(matrix: Float[Tensor, "n n"], diagonal: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
    """Return a copy of a matrix with something added to its diagonal."""
    copy = matrix.clone()
    copy.diagonal().add_(diagonal)
    return copy


def solve_on_support(
    gram: Float[Tensor, "n n"],
    target: Float[Tensor, "n outputs"],
    support: Bool[Tensor, "n outputs"],
    *,
    energy: float | Float[Tensor, ""],
    start: Float[Tensor, "n outputs"] | None = None,
    tolerance: float = _TOLERANCE,
) -> Float[Tensor, "n outputs"]:
    """Minimise E - 2·tr(XᵀB) + tr(XᵀGX) over matrices X that are zero outside a support; all columns at once.

    With SᵀS = G, B = GW and E = ‖SW‖² that is ‖S(W - X)‖². The result equals `torch.linalg.lstsq` on the kept rows of
    each column, but is computed by conjugate gradients, as a factorization per column would cost n³ each; see
    `descend`.

    Args:
        gram: G, symmetric, positive definite on every support.
        target: B.
        support: where X may be nonzero.
        energy: E, the error of X = 0.
        start: initial X; entries outside the support are ignored. None starts at zero.
        tolerance: allowed excess of the error over the minimum, relative to the minimum, > 0.

    Returns:
        X, in the dtype and on the device of `gram`.
    """
    unit = UnitGram.of(gram)
    kept = support.mT.to(gram.dtype, memory_format=torch.contiguous_format)
    goal = target.mT / unit.lengths
    solution = torch.zeros_like(goal) if start is None else start.mT * unit.lengths * kept
    residual = torch.addmm(goal, solution, unit.matrix, alpha=-1)
    # XᵀB + Xᵀ(B - GX)
    error = energy - inner_product(solution, goal) - inner_product(solution, residual)
    floor = torch.finfo(gram.dtype).eps * energy
    descend(unit, solution, residual, kept, error=error, floor=floor, tolerance=tolerance)
    return (solution / unit.lengths).mT.contiguous()


def descend(
    unit: UnitGram,
    solution: Float[Tensor, "outputs n"],
    residual: Float[Tensor, "outputs n"],
    kept: Float[Tensor, "outputs n"],
    *,
    error: Float[Tensor, ""],
    floor: float | Float[Tensor, ""],
    tolerance: float,
) -> None:
    """Reduce the error of Xᵀ on its support by conjugate gradients, in place; all rows at once.

    The preconditioner is the part of G⁻¹ on the support. It is the inverse of a Schur complement and so at least the
    inverse of G on the support, which makes rᵀG⁻¹r, r the residual on the support, an upper bound on the remaining
    gain: the search ends when the error is guaranteed to be within `tolerance` of the minimum. A step costs two
    products with an n by n matrix for all rows; on the layers of a language model a third as many steps are needed as
    with a diagonal preconditioner.

    Args:
        unit: the Gram matrix.
        solution: Xᵀ, zero where `kept` is.
        residual: (B - GX)ᵀ, also outside the support; kept up to date.
        kept: 1 on the support, else 0.
        error: error of the given solution.
        floor: error that counts as zero.
        tolerance: allowed excess of the error over the minimum, relative to the minimum.

    References:
        Hestenes and Stiefel, 1952; rows are independent systems with one matrix.
    """
    slope = residual * kept
    ahead = (slope @ unit.inverse).mul_(kept)
    direction = ahead.clone()
    gain = torch.linalg.vecdot(slope, ahead)[:, None]
    for _ in range(min(_MOST_STEPS, 2 * solution.shape[1])):
        if bool(gain.sum(dtype=torch.float64) <= tolerance * error.clamp_min(floor)):
            break
        product = direction @ unit.matrix
        curvature = torch.linalg.vecdot(direction, product)[:, None]
        step = torch.where(curvature > 0, gain / curvature, 0)
        solution.addcmul_(direction, step)
        residual.addcmul_(product, step, value=-1)
        error = error - (step * gain).sum(dtype=torch.float64)
        torch.mul(residual, kept, out=slope)
        torch.mm(slope, unit.inverse, out=ahead).mul_(kept)
        next_gain = torch.linalg.vecdot(slope, ahead)[:, None]
        direction.mul_(torch.where(gain > 0, next_gain / gain, 0)).add_(ahead)
        gain = next_gain


def output_errors(gram: Float[Tensor, "d_in d_in"], removed: Float[Tensor, "d_in d_out"]) -> Float[Tensor, " d_out"]:
    """Return the diagonal of EᵀGE, E = W - W̃, in float64: each output's squared error over the calibration tokens."""
    return (removed * (gram @ removed)).sum(dim=0, dtype=torch.float64).clamp_min(0)


def inner_product(left: Float[Tensor, "rows n"], right: Float[Tensor, "rows n"]) -> Float[Tensor, ""]:
    """Return the sum of the products of all entries, within rows in the matrices' dtype and over rows in float64."""
    product: Tensor = torch.linalg.vecdot(left, right).sum(dtype=torch.float64)
    return product


def largest(scores: Float[Tensor, "rows columns"], count: int) -> Bool[Tensor, "rows columns"]:
    """Return a mask of the `count` largest scores of a matrix.

    Ties are broken by position on CPUs, and as `topk` does it elsewhere.

    Args:
        scores: any finite numbers.
        count: 0 to `scores.numel()`.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    flat = scores.flatten()
    if scores.device.type != "cpu":
        places = flat.topk(count, sorted=False).indices
        return torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, places, 1).view(scores.shape)
    place = flat.numel() - count  # torch's own selection takes eight times as long
    least = torch.from_numpy(np.partition(flat.numpy(), place))[place]
    chosen = flat >= least
    if int(chosen.count_nonzero()) > count:
        equal = (flat == least).nonzero()[:, 0]
        chosen[equal[len(equal) + count - int(chosen.count_nonzero()) :]] = False
    return chosen.view(scores.shape)


def column_energies(matrix: Float[Tensor, "d_in d_out"]) -> Float[Tensor, " d_out"]:
    """Return the squared norm of each column, added up in its dtype, in float64.

    torch adds in pairs, which keeps the digits; sums in float64 take 5 times as long on a CPU.
    """
    return matrix.square().sum(dim=0).double()
