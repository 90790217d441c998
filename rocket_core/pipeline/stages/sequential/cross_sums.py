"""Sums over what layers read in the dense and in the compressed model, and the targets that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.sequential_target import compensation, least_squares_step, token_weights
from rocket_core.linalg.whitening import WEIGHTED_SHRINKAGE, gram_matrix, shrunk_for_weights, tokens_that_count

# Part of the way from a weight to the one that compensates for earlier errors. The step that is best for tokens that it
# was not fitted to is still too long for other texts, since the layers before were fitted to all tokens. KL with that
# step, with at most 0.6 of the way, with half of the way for all layers, and without any: SmolLM2 at 80 MB 0.0347,
# 0.0347, 0.0392, 0.0350; tiny-llama at 3 bits 0.0133, 0.0135, 0.0138, 0.0161; stories260K at ratio 0.5 0.486, 0.472,
# 0.471, 0.677, at 0.3 0.0475, 0.0471, 0.0484, 0.0634.
_LONGEST_STEP = 0.6
_STEP_IN_WHOLE_TEXTS = 0.25


@dataclass(kw_only=True, slots=True)
class HalfSums:
    """Running sums over one half of the tokens, in float64. Attributes are as in `CrossSums`."""

    weights: Sequence[Float[Tensor, " tokens"]] = ()
    tokens: float = 0
    gram: Tensor = field(default_factory=lambda: torch.zeros(()))
    cross: Tensor = field(default_factory=lambda: torch.zeros(()))
    deviation: Tensor | None = None

    def add(self, rows: Tensor, dense_rows: Tensor, deviation: Tensor | None, weights: Tensor | None) -> None:
        """Add rows, of which those of both models are already multiplied by the roots of their weights."""
        if weights is not None:
            self.weights = (*self.weights, weights)
        self.tokens += len(rows)
        self.gram = self.gram + gram_matrix(rows)
        self.cross = self.cross + (rows.mT @ dense_rows).double()
        if deviation is not None:
            product = (rows.mT @ deviation).double()
            self.deviation = product if self.deviation is None else self.deviation + product

    def plus(self, other: "HalfSums", share: float = 1.0) -> "HalfSums":
        """Return these sums and a share of others."""
        deviation = self.deviation
        if deviation is not None and other.deviation is not None:
            deviation = deviation + share * other.deviation
        return HalfSums(
            weights=(*self.weights, *other.weights),
            tokens=self.tokens + share * other.tokens,
            gram=self.gram + share * other.gram,
            cross=self.cross + share * other.cross,
            deviation=deviation,
        )

    def missing(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """Return X'ᵀ(Y - X'W), with Y the outputs XW of the dense layer, or S - S' + XW."""
        missing = (self.cross - self.gram) @ weight
        return missing if self.deviation is None else missing + self.deviation

    def compensation(self, weight: Float[Tensor, "d_in d_out"], shrinkage: float) -> Float[Tensor, "d_in d_out"]:
        """Return the change of a weight that gives what is missing, as far as the tokens determine it."""
        tokens = self.tokens
        if self.weights:
            tokens, shrinkage = tokens_that_count(torch.cat(list(self.weights))), WEIGHTED_SHRINKAGE
        return compensation(self.gram, self.missing(weight), tokens=tokens, shrinkage=shrinkage)


@dataclass(kw_only=True, slots=True)
class CrossSums:
    """Running sums over the inputs X of a dense layer and X' of the same layer after compressed ones, in float64.

    Attributes:
        weights: how much each token counts, in the order in which they are added; None if all count the same.
        halves: the sums over X' of the first and of the last half of the tokens. Windows that follow one another are
            often of the same text: halves of every batch would tell less of other texts.
        dense_gram: XᵀX.
    """

    weights: Float[Tensor, " tokens"] | None = None
    halves: tuple[HalfSums, HalfSums] = field(default_factory=lambda: (HalfSums(), HalfSums()))
    dense_gram: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(
        self,
        rows: Float[Tensor, "rows d_in"],
        dense_rows: Float[Tensor, "rows d_in"],
        deviation: Float[Tensor, "rows d_out"] | None = None,
        *,
        first: float,
        counts: Float[Tensor, " rows"] | None = None,
    ) -> None:
        """Add the rows of a batch.

        Args:
            rows: X'.
            dense_rows: X.
            first: part of the rows that belongs to the first half of the tokens, [0, 1].
            counts: how much the error of each row counts, in addition to `weights`; None if all count the same.
            deviation: S - S', what the residual stream of the compressed model lacks, for a layer whose output is added
                to it.
        """
        weights = counts
        if self.weights is not None:
            weights = self.weights[self.tokens : self.tokens + len(rows)].to(rows)
            weights = weights if counts is None else weights * counts
        if weights is not None:
            roots = weights[:, None].sqrt().to(rows)
            rows, dense_rows = rows * roots, dense_rows * roots
            deviation = None if deviation is None else deviation * roots
        middle = round(first * len(rows))
        for part, half in zip((slice(middle), slice(middle, None)), self.halves, strict=True):
            if len(rows[part]):
                parts = (None if whole is None else whole[part] for whole in (deviation, weights))
                half.add(rows[part], dense_rows[part], *parts)
        self.dense_gram = self.dense_gram + gram_matrix(dense_rows)

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return round(sum(half.tokens for half in self.halves))

    @property
    def total(self) -> HalfSums:
        """X'ᵀX', X'ᵀX, and X'ᵀ(S - S') for a layer whose output is added to a residual stream, over all tokens."""
        first, second = self.halves
        return first.plus(second)

    def target(self, weight: Float[Tensor, "d_in d_out"], shrinkage: float) -> Float[Tensor, "d_in d_out"]:
        """Return what a layer is compressed towards, in float64: a part of the way to XW, or to S - S' + XW.

        With all of the way, a layer also fits the noise that earlier layers happen to produce in the calibration
        windows, and answers deviating inputs with outputs that are too small. The part is the one that errs least on
        the half of the tokens that a change was not fitted to, whichever half that is; see `_LONGEST_STEP`.
        """
        if not all(half.tokens for half in self.halves):
            return weight
        return weight + self._step(weight, shrinkage) * self.total.compensation(weight, shrinkage)

    def _step(self, weight: Float[Tensor, "d_in d_out"], shrinkage: float) -> Float[Tensor, ""]:
        changes = [half.compensation(weight, shrinkage) for half in self.halves]
        others = reversed(self.halves)
        step = least_squares_step(
            (change, other.gram, other.missing(weight)) for change, other in zip(changes, others, strict=True)
        )
        return step.clamp(0, _LONGEST_STEP)

    @property
    def fitted_gram(self) -> Float[Tensor, "d_in d_in"]:
        """The Gram matrix under which the target is approximated."""
        total = self.total
        return shrunk_for_weights(total.gram, torch.cat(list(total.weights))) if total.weights else total.gram


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

    def add(
        self,
        rows: Float[Tensor, "rows d_in"],
        dense_rows: Float[Tensor, "rows d_in"],
        deviation: Float[Tensor, "rows d_out"] | None = None,
        *,
        first: float,
        counts: Float[Tensor, " rows"] | None = None,
    ) -> None:
        """Add the rows of a batch."""
        CrossSums.add(self, rows, dense_rows, deviation, first=first, counts=counts)
        weighted = rows * token_weights(dense_rows @ self.weight, self.mean_energy)[:, None]
        self.weighted_gram = self.weighted_gram + (weighted.mT @ rows).double()
        self.weighted_cross = self.weighted_cross + (weighted.mT @ dense_rows).double()

    def target(self, weight: Float[Tensor, "d_in d_out"], shrinkage: float) -> Float[Tensor, "d_in d_out"]:
        """Return what a layer is compressed towards, in float64."""
        missing = (self.weighted_cross - self.weighted_gram) @ weight
        change = compensation(self.weighted_gram, missing, tokens=self.tokens, shrinkage=shrinkage)
        return weight + _STEP_IN_WHOLE_TEXTS * change

    @property
    def fitted_gram(self) -> Float[Tensor, "d_in d_in"]:
        """The Gram matrix under which the target is approximated."""
        return self.dense_gram
