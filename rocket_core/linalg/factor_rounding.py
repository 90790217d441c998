"""Rounding of a low-rank factorization: both factors as integer codes.

The error of W ≈ DC is Σ_j f_j (w_j - Dc_j)ᵀG(w_j - Dc_j). Atoms as the factorizer returns them are orthogonal under
these weights, so that atoms contribute independently: D is rounded like a weight under G. C is then rounded towards the
coefficients that are best for the rounded D, under the Gram matrix D̃ᵀGD̃ of its atoms, which is exact.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.integer_codes import RoundedWeight, Scales, search_scales
from rocket_core.linalg.rounding import RoundingGram, gptq, improve
from rocket_core.sizes.code_format import CodeFormat

# Added to the diagonal of a matrix of atoms before it is inverted, as a part of its mean.
_RIDGE = 1e-6
# Replaces zero in divisors.
_LEAST_LENGTH = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorGrid:
    """The grid of a factor, whose scales are stored in another order than that of its columns.

    A factor X is the transpose of what is stored, M, row after row: for the dictionary M = Dᵀ, for the coefficients the
    sequence of all of them, output after output.

    Attributes:
        scales: the scales of M.
        columns: columns of X.
    """

    scales: Scales
    columns: int

    @property
    def levels(self) -> Levels:
        """See `Grid`."""
        return self.scales.levels

    def by_input(self, d_in: int, dtype: torch.dtype) -> Float[Tensor, "d_in columns"]:
        """See `Grid`."""
        rows = d_in * self.columns // self.scales.codes.shape[1]
        return self.scales.by_input(rows, dtype).reshape(self.columns, d_in).T

    def shifted(self, weight: Float[Tensor, "d_in columns"]) -> Float[Tensor, "d_in columns"]:
        """See `Grid`."""
        return weight

    def rounded(self, codes: Int8[Tensor, "d_in columns"]) -> "RoundedFactor":
        """See `Grid`."""
        return RoundedFactor(codes=codes, scales=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedFactor:
    """A rounded factor.

    Attributes:
        codes: what each entry is rounded to, in steps.
        scales: its grid.
    """

    codes: Int8[Tensor, "d_in columns"]
    scales: FactorGrid

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "d_in columns"]:
        """See `RoundedCodes`."""
        return self.codes.to(dtype) * self.scales.by_input(len(self.codes), dtype)

    def replaced(self, other: "RoundedFactor", outputs: Bool[Tensor, " columns"]) -> "RoundedFactor":
        """See `RoundedCodes`; both have the same grid."""
        return RoundedFactor(codes=torch.where(outputs, other.codes, self.codes), scales=self.scales)

    def stored(self) -> RoundedWeight:
        """Return M; see `FactorGrid`."""
        scales = self.scales.scales
        return RoundedWeight(codes=self.codes.T.reshape(-1, scales.codes.shape[1]), scales=scales)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedFactors:
    """A low-rank weight D̃C̃ made of codes.

    Attributes:
        dictionary: D̃.
        coefficients: C̃.
    """

    dictionary: RoundedFactor
    coefficients: RoundedFactor

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return D̃C̃."""
        return self.dictionary.weight(dtype) @ self.coefficients.weight(dtype)


def round_factors(
    weight: Float[Tensor, "d_in d_out"],
    gram: RoundingGram,
    importance: Float[Tensor, " d_out"],
    coefficients: Float[Tensor, "rank d_out"],
    code_format: CodeFormat,
    *,
    improved: bool = True,
) -> RoundedFactors:
    """Round a low-rank factorization of a weight.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        importance: f, > 0.
        coefficients: C, in the weight's dtype; its rows are orthogonal under f, or nearly so.
        code_format: bits of codes and scales, and the size of groups.
        improved: also improve codes by coordinate descent, and then both factors a second time if that helps.
    """
    rounding = _Rounding(
        weight=weight, gram=gram, importance=importance.to(weight.dtype), code_format=code_format, improved=improved
    )
    found = rounding.round(coefficients)
    if not improved:
        return found
    again = rounding.round(found.coefficients.weight(weight.dtype))
    return again if rounding.error(again) < rounding.error(found) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rounding:
    """What `round_factors` is given, apart from the coefficients."""

    weight: Float[Tensor, "d_in d_out"]
    gram: RoundingGram
    importance: Float[Tensor, " d_out"]
    code_format: CodeFormat
    improved: bool

    def round(self, coefficients: Float[Tensor, "rank d_out"]) -> RoundedFactors:
        """Round the best dictionary for some coefficients, and then the best coefficients for that."""
        weighted = coefficients * self.importance
        dictionary = _solve(weighted @ coefficients.T, weighted @ self.weight.T).T
        lengths = (dictionary * (self.gram.matrix @ dictionary)).sum(dim=0).clamp_min(_LEAST_LENGTH).sqrt()
        energies = (weighted * coefficients).sum(dim=1)
        # A scale is shared by several atoms: give each the same length in both factors.
        balance = (energies.sqrt() / lengths).sqrt()
        atoms = self._rounded(
            dictionary * balance, self.gram, rows=len(balance), importance=(energies / balance.square())[:, None]
        )
        rounded = atoms.weight(self.weight.dtype)
        products = self.gram.matrix @ rounded
        inner = RoundingGram.of(rounded.T @ products)
        values = self._rounded(
            _solve(inner.matrix, products.T @ self.weight),
            inner,
            rows=coefficients.numel(),
            importance=self.importance[:, None] * inner.matrix.diagonal(),
        )
        return RoundedFactors(dictionary=atoms, coefficients=values)

    def error(self, rounded: RoundedFactors) -> float:
        """Return the weighted error."""
        errors = self.gram.errors(self.weight - rounded.weight(self.weight.dtype))
        return float((errors * self.importance).sum())

    def _rounded(
        self, factor: Float[Tensor, "rows columns"], gram: RoundingGram, *, rows: int, importance: Tensor
    ) -> RoundedFactor:
        """Round a factor that is stored with so many rows, each of whose entries has the same importance."""
        stored = factor.T.reshape(rows, -1)
        scales = search_scales(stored, importance.reshape(rows), self.code_format)
        rounded = gptq(factor, gram, FactorGrid(scales=scales, columns=factor.shape[1]))
        return improve(factor, gram, rounded) if self.improved else rounded


def _solve(matrix: Float[Tensor, "rank rank"], goal: Float[Tensor, "rank columns"]) -> Float[Tensor, "rank columns"]:
    """Return the solution of a positive semidefinite system, in the dtype of the goal."""
    exact = matrix.double().clone()
    ridge = (_RIDGE * exact.diagonal().mean()).clamp_min(_LEAST_LENGTH)
    exact.diagonal().add_(ridge)
    # Not singular, thanks to the ridge; to ask makes a GPU wait.
    solution: Tensor = torch.linalg.solve_ex(exact, goal.double())[0]
    return solution.to(goal.dtype)
