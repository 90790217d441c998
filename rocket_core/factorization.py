"""The factorizer: importance, support, closed-form dictionary and exact errors of one layer (paper, section 3).

Pure functions of tensors. Profiling measures candidates with the same `factorize_layer` that compression applies.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.errors import IllConditionedGramError
from rocket_core.whitening import Eigenbasis


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorizerSettings:
    """What the mathematics of a factorization depends on.

    Attributes:
        importance_balance: λ, weight of the original-space importance, [0, 1].
        over_sparsification: β, coefficients per atom and column left to the global reactivation, [0, 1).
        ridge: μ, relative to the energy of each coefficient row, > 0. Not below 8 ulp of the computing dtype.
    """

    importance_balance: float = 0.5
    over_sparsification: float = 5e-3
    ridge: float = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLayer:
    """What all candidates of a layer share.

    Attributes:
        weight: W.
        weight_core: a matrix of at most min(d_in, d_out) rows with the same inner products as W; ‖W - UC‖ is
            computed from it at the cost of the smaller side.
        basis: V and Σ, in the computing dtype.
        importance: importance of every coefficient.
        settings: the factorizer's settings.
        weight_energy: ‖W‖².
        whitened_energy: ‖SW‖².
    """

    weight: Float[Tensor, "d_in d_out"]
    weight_core: Float[Tensor, "side d_out"]
    basis: Eigenbasis
    importance: Float[Tensor, "m d_out"]
    settings: FactorizerSettings
    weight_energy: float
    whitened_energy: float

    @property
    def max_rank(self) -> int:
        """Atoms that the eigenbasis offers, min(d_in, d_out)."""
        return self.importance.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factorization:
    """A factored layer: W ≈ D @ C.

    The dictionary and either error are computed on request, since profiling needs one error and compression the rest.

    Attributes:
        layer: what was factorized.
        coefficients: C; rows scaled to unit energy before sparsification.
        support: where C may be nonzero; None if everywhere.
        cholesky: lower-triangular factor of CCᵀ + μR.
    """

    layer: PreparedLayer
    coefficients: Float[Tensor, "rank d_out"]
    support: Bool[Tensor, "rank d_out"] | None
    cholesky: Float[Tensor, "rank rank"]

    def dictionary(self) -> Float[Tensor, "d_in rank"]:
        """D = W Cᵀ (CCᵀ + μR)⁻¹, the least-squares dictionary in the original and in the whitened space alike."""
        return torch.cholesky_solve(self.coefficients @ self.layer.weight.mT, self.cholesky).mT

    def weight_error(self) -> float:
        """Relative error ‖W - DC‖ / ‖W‖, from ‖W‖² - ‖L⁻¹CWᵀ‖² without forming DC."""
        explained = self._explained(self.coefficients @ self.layer.weight_core.mT)
        return _relative_error(self.layer.weight_energy - explained, self.layer.weight_energy)

    def reconstruction_error(self) -> float:
        """Relative error ‖S(W - DC)‖ / ‖SW‖ of the layer's output over the calibration tokens.

        With E what sparsification and truncation take from SW: ‖E‖² - ‖L⁻¹CEᵀ‖². Starting from E instead of SW keeps
        all digits where a few directions hold nearly all energy (massive activations) and the error is tiny beside it.
        """
        rank = self.coefficients.shape[0]
        removed = self.layer.basis.directions * self.layer.basis.singular_values
        removed[:, :rank] = 0 if self.support is None else removed[:, :rank].masked_fill(self.support.mT, 0)
        residual = float(removed.square().sum(dim=0).sum(dtype=torch.float64))
        return _relative_error(residual - self._explained(self.coefficients @ removed), self.layer.whitened_energy)

    def _explained(self, projection: Float[Tensor, "rank side"]) -> float:
        solved = torch.linalg.solve_triangular(self.cholesky, projection, upper=False)
        # Float32 sums of one row are accurate; the sum over rows is what would lose digits.
        return float(torch.linalg.vecdot(solved, solved).sum(dtype=torch.float64))


def prepare_layer(
    weight: Float[Tensor, "d_in d_out"], basis: Eigenbasis, settings: FactorizerSettings, *, dtype: torch.dtype
) -> PreparedLayer:
    """Computes what all candidates of a layer share.

    Importance of coefficient (i, j) is |c_ij| · ‖S⁻¹b_i‖^λ = |v_ji| · σ_i^(1-λ) · ‖W v_i‖^λ, since ‖S⁻¹b_i‖ is
    ‖W v_i‖ / σ_i.

    Args:
        weight: W, in any floating dtype.
        basis: eigenbasis of SW, in float64 for accurate errors.
        settings: the factorizer's settings.
        dtype: computing dtype, float32 or float64.

    Returns:
        The prepared layer, on the device of `weight`.

    References:
        ROCKET, equations 4-7.
    """
    precise = weight.to(torch.float64)
    directions = basis.directions.to(torch.float64)
    lengths = torch.linalg.vector_norm(precise @ directions, dim=0)
    balance = settings.importance_balance
    row_importance = basis.singular_values ** (1 - balance) * lengths**balance
    # Kept with the outputs as rows, so that selecting the best of a column walks along memory.
    importance = (directions.abs() * row_importance).to(dtype).contiguous().mT
    core = precise if weight.shape[0] <= weight.shape[1] else torch.linalg.qr(precise, mode="r").R
    return PreparedLayer(
        weight=weight.to(dtype),
        weight_core=core.to(dtype),
        basis=Eigenbasis(
            directions=basis.directions.to(dtype).contiguous(), singular_values=basis.singular_values.to(dtype)
        ),
        importance=importance,
        settings=settings,
        weight_energy=float(precise.square().sum()),
        whitened_energy=float(basis.singular_values.square().sum(dtype=torch.float64)),
    )


def select_support(
    importance: Float[Tensor, "rank d_out"], nnz: int, over_sparsification: float
) -> Bool[Tensor, "rank d_out"]:
    """Chooses exactly `nnz` coefficients: the top s of each column, then the best of the rest of the matrix.

    s = floor(nnz / d_out - β·rank), so that a fraction β of the matrix is left to the global second step.

    Args:
        importance: importance of each coefficient, >= 0.
        nnz: coefficients to keep, 1 to `importance.numel()`.
        over_sparsification: β, [0, 1).

    Returns:
        The support, on the device of `importance`.

    References:
        ROCKET, section 3, two-stage sparsification.
    """
    rank, d_out = importance.shape
    per_column = max(0, math.floor(nnz / d_out - over_sparsification * rank))
    rows = importance.mT
    support = torch.zeros(d_out, rank, dtype=torch.bool, device=importance.device)
    if per_column:
        support.scatter_(1, rows.topk(per_column, dim=1, sorted=False).indices, value=True)
    remaining = nnz - per_column * d_out
    if remaining:
        rest = rows.masked_fill(support, -1.0).flatten()
        support.view(-1)[rest.topk(remaining, sorted=False).indices] = True
    return support.mT


def factorize_layer(layer: PreparedLayer, rank: int, nnz: int) -> Factorization:
    """Factorizes W ≈ D C with `rank` atoms and exactly `nnz` nonzero coefficients.

    C is Vᵀ's first `rank` rows on the selected support, D minimises ‖S(W - DC)‖² + μ Σ_i ‖c_i‖²‖d_i‖² in closed form.
    With nnz = rank · d_out this is the truncated SVD of SW.

    Args:
        layer: the prepared layer.
        rank: atoms, 1 to `layer.max_rank`.
        nnz: nonzero coefficients, 1 to rank · d_out.

    Returns:
        The factorization, on the layer's device and in its dtype.

    Raises:
        IllConditionedGramError: the kept coefficients are linearly dependent beyond what the ridge can mend.

    References:
        ROCKET, section 3, closed-form dictionary.
    """
    rows = layer.basis.directions[:, :rank]
    support = None
    if nnz < rank * rows.shape[0]:
        support = select_support(layer.importance[:rank], nnz, layer.settings.over_sparsification)
        rows = torch.where(support.mT, rows, 0)
    coefficients = rows.mT
    cholesky = _regularised_cholesky(coefficients @ rows, layer.settings.ridge)
    return Factorization(layer=layer, coefficients=coefficients, support=support, cholesky=cholesky)


def _regularised_cholesky(gram: Float[Tensor, "rank rank"], ridge: float) -> Float[Tensor, "rank rank"]:
    """Lower factor of A + μ·diag(A). Rows without any coefficient get a unit diagonal: their atoms become zero."""
    energy = gram.diagonal()
    ridge = max(ridge, 8 * torch.finfo(gram.dtype).eps)
    gram = gram + torch.diag(torch.where(energy > 0, ridge * energy, 1.0))
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) != 0:
        raise IllConditionedGramError(
            f"the coefficients kept at rank {gram.shape[0]} are linearly dependent; raise the ridge setting, or use "
            "precision float64"
        )
    return factor


def _relative_error(residual: float, energy: float) -> float:
    """The root of residual / energy. Rounding may leave a residual below zero; an all-zero layer has no error."""
    return math.sqrt(max(residual, 0.0) / energy) if energy > 0 else 0.0
