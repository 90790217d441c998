"""Sums over what layers read in the dense and in the compressed model, and the targets that follow from them."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.gram_sum import add_gram, symmetric
from rocket_core.linalg.sequential_target import part_way_target, token_weights, validated_target
from rocket_core.linalg.whitening import WEIGHTED_SHRINKAGE, shrunk_for_weights, tokens_that_count

# Largest part of the way from a weight to the target that compensates for earlier errors; see `validated_target`.
_STEP = 0.5
# The part in texts that are read in both directions; see `WholeTextSums`.
_STEP_IN_WHOLE_TEXTS = 0.25


@dataclass(kw_only=True, slots=True)
class HalfSums:
    """The sums over half of the tokens.

    Attributes:
        gram: X'ᵀX'.
        cross: X'ᵀX.
        deviation: X'ᵀ(S - S'), with S and S' the residual streams that the layer's output is added to, in the dense and
            in the compressed model; None for a layer whose output is added to none.
    """

    gram: Float[Tensor, "d_in d_in"]
    cross: Float[Tensor, "d_in d_in"]
    deviation: Float[Tensor, "d_in d_out"] | None = None

    def products(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """Return X'ᵀ(XW), or X'ᵀ(S - S' + XW)."""
        products = self.cross @ weight
        return products if self.deviation is None else products + self.deviation


@dataclass(kw_only=True, slots=True)
class CrossSums:
    """Running sums over the inputs X of a dense layer and X' of the same layer after compressed ones, in float64.

    Attributes:
        weights: how much each token counts, in the order in which they are added; None if all count the same.
        tokens: number of rows.
        dense_gram: XᵀX.
        halves: the other sums, of the first and of the second half of each batch; empty before the first.
    """

    weights: Float[Tensor, " tokens"] | None = None
    tokens: int = 0
    dense_gram: Tensor = field(default_factory=lambda: torch.zeros(()))
    halves: tuple[HalfSums, ...] = ()

    @property
    def gram(self) -> Float[Tensor, "d_in d_in"]:
        """X'ᵀX'."""
        return self.halves[0].gram + self.halves[1].gram

    @property
    def cross(self) -> Float[Tensor, "d_in d_in"]:
        """X'ᵀX."""
        return self.halves[0].cross + self.halves[1].cross

    def add(self, rows: Float[Tensor, "rows d_in"], dense_rows: Float[Tensor, "rows d_in"]) -> None:
        """Add the rows of a batch."""
        if self.weights is not None:
            roots = self.weights[self.tokens : self.tokens + len(rows), None].sqrt().to(rows)
            rows, dense_rows = rows * roots, dense_rows * roots
        self.tokens += rows.shape[0]
        if not self.halves:
            width = rows.shape[1]
            self.dense_gram, *others = (rows.new_zeros((width, width), dtype=torch.float64) for _ in range(5))
            self.halves = tuple(HalfSums(gram=gram, cross=cross) for gram, cross in (others[:2], others[2:]))
        for half, own, dense in zip(self.halves, _halves(rows), _halves(dense_rows), strict=True):
            symmetric(add_gram(half.gram, own))
            half.cross += own.mT @ dense
        symmetric(add_gram(self.dense_gram, dense_rows))

    def add_deviation(self, rows: Float[Tensor, "rows d_in"], deviation: Float[Tensor, "rows d_out"]) -> None:
        """Add what the residual stream of the compressed model lacks, for the rows that were added last."""
        if self.weights is not None:
            rows = rows * self.weights[self.tokens - len(rows) : self.tokens, None].to(rows)
        for half, own, lacking in zip(self.halves, _halves(rows), _halves(deviation), strict=True):
            product = (own.mT @ lacking).double()
            half.deviation = product if half.deviation is None else half.deviation + product

    def target(self, weight: Float[Tensor, "d_in d_out"], shrinkage: float) -> Float[Tensor, "d_in d_out"]:
        """Return what a layer is compressed towards, in float64: at most half of the way to XW, or to S - S' + XW."""
        tokens: float = self.tokens
        if self.weights is not None:
            tokens, shrinkage = tokens_that_count(self.weights), WEIGHTED_SHRINKAGE
        grams, products = zip(*((half.gram, half.products(weight)) for half in self.halves), strict=True)
        return validated_target(weight, grams, products, tokens=tokens, shrinkage=shrinkage, step=_STEP)

    @property
    def fitted_gram(self) -> Float[Tensor, "d_in d_in"]:
        """The Gram matrix under which the target is approximated."""
        return self.gram if self.weights is None else shrunk_for_weights(self.gram, self.weights)


def _halves(rows: Float[Tensor, "rows width"]) -> tuple[Tensor, Tensor]:
    middle = len(rows) // 2
    return rows[:middle], rows[middle:]


@dataclass(kw_only=True, slots=True)
class WholeTextSums(CrossSums):
    """Running sums for a block that reads text in both directions.

    Calibration windows show a decoder texts of all lengths up to theirs, but only one length to such a block. In
    shorter texts its inputs deviate in other ways, and what compensates for deviations in windows adds to them.
    Therefore the target is nearer to the weight, is approximated for the inputs of the dense model, and is fitted with
    tokens that count relative to their outputs.

    Attributes:
        weight: the concatenated weights of all layers that read the input, in the computing precision.
        mean_energy: mean of a token's squared output.
        weighted_gram: X'ᵀTX', with T the diagonal of `token_weights`.
        weighted_cross: X'ᵀTX.
    """

    weight: Tensor
    mean_energy: float
    weighted_gram: Tensor = field(default_factory=lambda: torch.zeros(()))
    weighted_cross: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Float[Tensor, "rows d_in"], dense_rows: Float[Tensor, "rows d_in"]) -> None:
        """Add the rows of a batch."""
        CrossSums.add(self, rows, dense_rows)
        weighted = rows * token_weights(dense_rows @ self.weight, self.mean_energy)[:, None]
        self.weighted_gram = self.weighted_gram + (weighted.mT @ rows).double()
        self.weighted_cross = self.weighted_cross + (weighted.mT @ dense_rows).double()

    def target(self, weight: Float[Tensor, "d_in d_out"], shrinkage: float) -> Float[Tensor, "d_in d_out"]:
        """Return what a layer is compressed towards, in float64."""
        sums = self.weighted_gram, self.weighted_cross @ weight
        return part_way_target(weight, *sums, tokens=self.tokens, shrinkage=shrinkage, step=_STEP_IN_WHOLE_TEXTS)

    @property
    def fitted_gram(self) -> Float[Tensor, "d_in d_in"]:
        """The Gram matrix under which the target is approximated."""
        return self.dense_gram
