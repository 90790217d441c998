"""The factorizer: importance, support, closed-form dictionary and exact errors of one layer (paper, section 3).

Pure functions of tensors. Profiling measures candidates with the same `factorize_layer` that compression applies.

Two variants are obtained by passing a different weight: a dictionary shared by several layers (their weights,
concatenated by columns), and errors weighted by output (W with scaled columns; scale the coefficients' columns back).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from rocket_core.config import Sparsification, WeightMetric
from rocket_core.errors import IllConditionedGramError
from rocket_core.linalg.least_squares import largest, solve_on_support
from rocket_core.linalg.whitening import Eigenbasis


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorizerSettings:
    """The mathematical settings of a factorization.

    Attributes:
        importance_balance: λ, weight of the original-space importance, [0, 1].
        over_sparsification: β, coefficients per atom and column left to the global reactivation, [0, 1).
        ridge: μ, relative to the energy of each coefficient row, > 0; at least 8 ulp of the computing dtype are used.
        sparsification: strategy for choosing a support, see `select_support`.
        sweeps: how often support, coefficients and dictionary are improved in turn, see `sweep`.
        metric: metric of `Factorization.weight_error`.
    """

    importance_balance: float = 0.5
    over_sparsification: float = 5e-3
    ridge: float = 1e-9
    sparsification: Sparsification = "two-stage"
    sweeps: int = 0
    metric: WeightMetric = "frobenius"


@dataclass(frozen=True, kw_only=True)
class PreparedLayer:
    """The precomputed data that all candidates of a layer share.

    Attributes:
        weight: W.
        basis: V and Σ, in the computing dtype.
        importance: importance of every coefficient.
        settings: the factorizer's settings.
        weight_energy: ‖W‖².
        whitened_energy: ‖SW‖².
    """

    weight: Float[Tensor, "d_in d_out"]
    basis: Eigenbasis
    importance: Float[Tensor, "m d_out"]
    settings: FactorizerSettings
    weight_energy: float
    whitened_energy: float

    @cached_property
    def weight_core(self) -> Float[Tensor, "side d_out"]:
        """A matrix of at most min(d_in, d_out) rows with the same inner products as W, to compute ‖W - UC‖ from."""
        tall = self.weight.shape[0] > self.weight.shape[1]
        core = torch.linalg.qr(self.weight.double(), mode="r").R if tall else self.weight
        return core.to(self.weight.dtype)

    @property
    def whitened(self) -> Float[Tensor, "m d_out"]:
        """ΣVᵀ, which is SW in the coordinates of its left singular vectors."""
        return (self.basis.directions * self.basis.singular_values).mT


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """A factored layer: W ≈ D @ C.

    The dictionary and both errors are computed on request, since profiling needs one error and compression the rest.
    All three raise `IllConditionedGramError` if the coefficients are linearly dependent despite the ridge.

    Attributes:
        layer: the factorized layer.
        coefficients: C; rows scaled to unit energy before sparsification.
        support: where C may be nonzero; None if everywhere.
        cholesky: lower-triangular factor of CCᵀ + μR.
        nnz: number of stored coefficients.
        failed: 0 unless that, or a matrix on the way to it, is not positive definite; left on the device until read.
        atoms: any A close to the whitened dictionary, in the coordinates of SW's left singular vectors; only the
            accuracy of `reconstruction_error` depends on it. None stands for the first singular values on the diagonal.
    """

    layer: PreparedLayer
    coefficients: Float[Tensor, "rank d_out"]
    support: Bool[Tensor, "rank d_out"] | None
    cholesky: Float[Tensor, "rank rank"]
    nnz: int
    failed: Int32[Tensor, ""]
    atoms: Float[Tensor, "m rank"] | None = None

    @property
    def rank(self) -> int:
        """Number of atoms."""
        return self.coefficients.shape[0]

    def dictionary(self) -> Float[Tensor, "d_in rank"]:
        """Return D = W Cᵀ (CCᵀ + μR)⁻¹, the least-squares dictionary in both the original and the whitened space."""
        self._read(self.failed)
        return torch.cholesky_solve(self.coefficients @ self.layer.weight.mT, self.cholesky).mT

    def weight_error(self) -> float:
        """Return the error in the original space, in the settings' metric.

        By default ‖W - DC‖ / ‖W‖, from ‖W‖² - ‖L⁻¹CWᵀ‖² without forming DC; the other metrics form it.
        """
        if self.layer.settings.metric != "frobenius":
            return weight_distance(self.layer.weight, self.dictionary() @ self.coefficients, self.layer.settings.metric)
        explained = self._read(self._explained(self.coefficients @ self.layer.weight_core.mT))
        return _relative_error(self.layer.weight_energy - explained, self.layer.weight_energy)

    @cached_property
    def reconstruction_error(self) -> float:
        """The relative error ‖S(W - DC)‖ / ‖SW‖ of the layer's output over the calibration tokens.

        With E = SW - AC for any A near the whitened dictionary: ‖E‖² - ‖L⁻¹CEᵀ‖². Starting from E instead of SW keeps
        all digits if a few directions hold nearly all energy (massive activations) and the error is tiny in comparison.
        """
        removed = self.layer.basis.directions * self.layer.basis.singular_values
        if self.atoms is not None:
            removed -= (self.atoms @ self.coefficients).mT
        elif self.support is None:
            removed[:, : self.rank] = 0
        else:
            removed[:, : self.rank].masked_fill_(self.support.mT, 0)
        residual = removed.square().sum(dim=0).sum(dtype=torch.float64)
        left = residual - self._explained(self.coefficients @ removed)
        return _relative_error(self._read(left), self.layer.whitened_energy)

    def whitened_dictionary(self) -> Float[Tensor, "m rank"]:
        """Return the whitened dictionary, in the coordinates of SW's left singular vectors."""
        return torch.cholesky_solve(self.coefficients @ self.layer.whitened.mT, self.cholesky).mT

    def column_errors(self) -> Float[Tensor, " d_out"]:
        """Return ‖S(w_j - D c_j)‖² of each output, in float64."""
        removed = self.layer.whitened - self.whitened_dictionary() @ self.coefficients
        return removed.square().sum(dim=0, dtype=torch.float64)

    def _explained(self, projection: Float[Tensor, "rank side"]) -> Float[Tensor, ""]:
        solved = torch.linalg.solve_triangular(self.cholesky, projection, upper=False)
        # Float32 sums of one row are accurate; the sum over rows would lose digits.
        explained: Tensor = torch.linalg.vecdot(solved, solved).sum(dtype=torch.float64)
        return explained

    def _read(self, number: Tensor) -> float:
        value, failed = torch.stack([number, self.failed]).tolist()
        if failed != 0:
            raise IllConditionedGramError(
                f"the coefficients kept at rank {self.rank} are linearly dependent; raise the ridge setting, or use "
                "precision float64"
            )
        return float(value)


def prepare_layer(
    weight: Float[Tensor, "d_in d_out"], basis: Eigenbasis, settings: FactorizerSettings, *, dtype: torch.dtype
) -> PreparedLayer:
    """Precompute the data that all candidates of a layer share.

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
    directions = basis.directions.to(dtype)
    balance = settings.importance_balance
    row_importance = basis.singular_values ** (1 - balance)
    if balance > 0:
        precise = weight.double() @ basis.directions.double()
        row_importance = row_importance * torch.linalg.vector_norm(precise, dim=0) ** balance
    energies = [weight.square().sum(dtype=torch.float64), basis.singular_values.square().sum(dtype=torch.float64)]
    weight_energy, whitened_energy = torch.stack(energies).tolist()
    # Stored with outputs as rows, so that selecting within a column reads contiguous memory.
    importance = (directions.abs() * row_importance.to(dtype)).contiguous().mT
    return PreparedLayer(
        weight=weight.to(dtype),
        basis=Eigenbasis(directions=directions.contiguous(), singular_values=basis.singular_values.to(dtype)),
        importance=importance,
        settings=settings,
        weight_energy=weight_energy,
        whitened_energy=whitened_energy,
    )


def select_support(
    importance: Float[Tensor, "rank d_out"],
    nnz: int,
    over_sparsification: float,
    sparsification: Sparsification = "two-stage",
) -> Bool[Tensor, "rank d_out"]:
    """Choose exactly `nnz` coefficients.

    - `two-stage`: the top s of each column, then the best of the rest of the matrix. s = floor(nnz / d_out - β·rank),
      so that a fraction β of the matrix is left to the global second step.
    - `per-row`: equally many of each row (the first rows get one more if `nnz` is not divisible).
    - `global`: the best of the matrix.

    Args:
        importance: importance of each coefficient, >= 0.
        nnz: number of coefficients to keep, 1 to `importance.numel()`.
        over_sparsification: β, [0, 1); for `two-stage`.
        sparsification: strategy.

    Returns:
        The support, on the device of `importance`.

    References:
        ROCKET, section 3, two-stage sparsification; appendix, ablation on the sparsification strategy.
    """
    rank, d_out = importance.shape
    if sparsification == "global":
        return largest(importance, nnz)
    if sparsification == "per-row":
        least, more = divmod(nnz, rank)
        counts = least + (torch.arange(rank, device=importance.device) < more).long()
        order = importance.argsort(dim=1, descending=True, stable=True)
        kept = torch.arange(d_out, device=importance.device) < counts[:, None]
        return torch.zeros_like(kept).scatter(1, order, kept)
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


def factorize_layer(layer: PreparedLayer, rank: int, nnz: int, *, sweeps: int | None = None) -> Factorization:
    """Factorize W ≈ D C with `rank` atoms and exactly `nnz` nonzero coefficients.

    C is Vᵀ's first `rank` rows on the selected support, D minimises ‖S(W - DC)‖² + μ Σ_i ‖c_i‖²‖d_i‖² in closed form.
    With nnz = rank · d_out this is the truncated SVD of SW, the optimum for its rank. Otherwise sweeps improve both.

    Args:
        layer: the prepared layer.
        rank: atoms, 1 to min(d_in, d_out).
        nnz: nonzero coefficients, 1 to rank · d_out.
        sweeps: number of sweeps; None takes that of the settings.

    Returns:
        The factorization, on the layer's device and in its dtype.

    References:
        ROCKET, section 3, closed-form dictionary.
    """
    rows = layer.basis.directions[:, :rank]
    settings = layer.settings
    support = None
    if nnz < rank * rows.shape[0]:
        support = select_support(layer.importance[:rank], nnz, settings.over_sparsification, settings.sparsification)
        rows = torch.where(support.mT, rows, 0)
    coefficients = rows.mT
    cholesky, failed = _regularised_cholesky(coefficients @ rows, settings.ridge)
    factorization = Factorization(
        layer=layer, coefficients=coefficients, support=support, cholesky=cholesky, nnz=nnz, failed=failed
    )
    return improve(factorization, settings.sweeps if sweeps is None else sweeps)


def improve(factorization: Factorization, sweeps: int | None = None) -> Factorization:
    """Apply sweeps, by default the settings' number of them; low-rank factors are already optimal and unchanged."""
    if factorization.support is not None:
        for _ in range(factorization.layer.settings.sweeps if sweeps is None else sweeps):
            factorization = sweep(factorization)
    return factorization


def sweep(factorization: Factorization) -> Factorization:
    """Improve support, coefficients and dictionary in turn, at the same rank and number of nonzeros.

    With A the whitened dictionary (columns normalised) and P = (AᵀA)⁻¹AᵀSW the coefficients without support constraint:

    1. the support takes the entries with the largest P_ij² / [(AᵀA)⁻¹]_ii, the increase of ‖SW - AC‖² if only that
       entry were removed (optimal brain surgeon);
    2. the coefficients are the exact least-squares solution on it;
    3. the dictionary is the closed-form solution for these.

    Steps 2 and 3 lower the error, step 1 nearly always does; the better of the old and the new result is returned.
    Costs 2·m·rank·d_out for the products and, for the least squares, about ten products of rank² · d_out.

    Args:
        factorization: one with a support.

    Returns:
        A factorization whose error is not larger than the given one's.

    References:
        Hassibi and Stork, "Optimal brain surgeon", 1993.
    """
    layer = factorization.layer
    whitened = layer.whitened
    atoms = factorization.whitened_dictionary()
    lengths = torch.linalg.vector_norm(atoms, dim=0)
    atoms = atoms / torch.where(lengths > 0, lengths, 1)
    gram = atoms.mT @ atoms
    products = atoms.mT @ whitened
    factor, failed = _regularised_cholesky(gram, layer.settings.ridge)
    inverse = torch.cholesky_inverse(factor)
    free = inverse @ products
    support = largest(free.square() / inverse.diagonal()[:, None], factorization.nnz)
    coefficients = solve_on_support(gram, products, support, energy=layer.whitened_energy, start=free)
    swept = with_best_dictionary(layer, coefficients, support, atoms, nnz=factorization.nnz)
    swept = replace(swept, failed=swept.failed + failed)
    return min(swept, factorization, key=lambda found: found.reconstruction_error)


def with_best_dictionary(
    layer: PreparedLayer,
    coefficients: Float[Tensor, "rank d_out"],
    support: Bool[Tensor, "rank d_out"],
    atoms: Float[Tensor, "m rank"],
    *,
    nnz: int,
) -> Factorization:
    """Return the factorization with given coefficients and the closed-form dictionary for them.

    Args:
        layer: the prepared layer.
        coefficients: C, zero outside the support.
        support: where C may be nonzero.
        atoms: the whitened dictionary that C was computed with, in the coordinates of the eigenbasis.
        nnz: entries of the support.
    """
    energy = torch.linalg.vector_norm(coefficients, dim=1)
    scale = torch.where(energy > 0, energy, 1)
    scaled, atoms = coefficients / scale[:, None], atoms * scale
    cholesky, failed = _regularised_cholesky(scaled @ scaled.mT, layer.settings.ridge)
    return Factorization(
        layer=layer, coefficients=scaled, support=support, cholesky=cholesky, nnz=nnz, failed=failed, atoms=atoms
    )


def weight_distance(
    weight: Float[Tensor, "d_in d_out"], approximation: Float[Tensor, "d_in d_out"], metric: WeightMetric
) -> float:
    """Return the distance of a weight from its approximation, relative to the weight.

    Args:
        weight: W.
        approximation: W̃.
        metric: `frobenius` ‖W - W̃‖ / ‖W‖; `l1` the same in the sum of absolute values; `spectral` in the largest
            singular value; `cosine` the mean over columns of 1 - cos(w_j, w̃_j), 1 where a column is zero.

    References:
        ROCKET, ablation on the reconstruction error metric.
    """
    difference = weight - approximation
    if metric == "cosine":
        tiny = torch.finfo(weight.dtype).tiny
        cosines = torch.nn.functional.cosine_similarity(weight, approximation, dim=0, eps=tiny)
        return max(0.0, 1 - float(cosines.mean()))
    norm: Callable[[Tensor], Tensor] = torch.linalg.matrix_norm
    if metric != "frobenius":
        norm = partial(torch.linalg.matrix_norm, ord=2) if metric == "spectral" else lambda matrix: matrix.abs().sum()
    part, total = float(norm(difference)), float(norm(weight))
    return part / total if total > 0 else 0.0


def _regularised_cholesky(
    gram: Float[Tensor, "rank rank"], ridge: float
) -> tuple[Float[Tensor, "rank rank"], Int32[Tensor, ""]]:
    """Factorize A + μ·diag(A), and return the factor and 0, or another number if it is not positive definite.

    Rows without coefficients get a unit diagonal, which makes their atoms zero.
    """
    energy = gram.diagonal()
    ridge = max(ridge, 8 * torch.finfo(gram.dtype).eps)
    gram = gram + torch.diag(torch.where(energy > 0, ridge * energy, 1.0))
    factor, failed = torch.linalg.cholesky_ex(gram)
    return factor, failed


def _relative_error(residual: float, energy: float) -> float:
    """Return √(residual / energy). Rounding may leave a residual below zero; an all-zero layer has no error."""
    return math.sqrt(max(residual, 0.0) / energy) if energy > 0 else 0.0
