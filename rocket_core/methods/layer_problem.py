"""What a method is given: a weight, and what calibration knows about the layer that it belongs to."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.layers import LayerFactors
from rocket_core.linalg.whitening import Eigenbasis, GramStatistics, basis_from_statistics, shrunk_gram

# With it a layer of any size at any error adds less to the loss than a model's loss can be measured to.
_LEAST_SENSITIVITY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressed:
    """A compressed weight.

    Attributes:
        factors: how it is stored.
        errors: ‖S(w_j - w̃_j)‖² · w_j² of each output j, in float64.
    """

    factors: LayerFactors
    errors: Float[Tensor, " d_out"]


@dataclass(kw_only=True, slots=True)
class LayerProblem:
    """A weight to compress: of one layer, or those of an input group side by side.

    The error that counts is ‖S(W - W̃)diag(w)‖², with w the column weights. A method scales W's columns by w, so that
    it can minimise an unweighted error, and scales what it found back.

    Attributes:
        weight: W.
        statistics: calibration statistics of the layer.
        shrinkage: pull of the Gram matrix towards its diagonal.
        precision: dtype in which supports and least squares are computed.
        column_weights: w = √E[g²] with g the gradient of the loss by each output, > 0; None where all outputs count
            the same and errors are no losses.
        members: output features of each layer whose weight is a part of W.
        basis: the eigenbasis of S W diag(w), in float64 on computing; None until it is first needed.
    """

    weight: Float[Tensor, "d_in d_out"]
    statistics: GramStatistics
    shrinkage: float
    precision: torch.dtype
    column_weights: Float[Tensor, " d_out"] | None = None
    members: tuple[int, ...] = ()
    basis: Eigenbasis | None = None
    _gram: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.members = self.members or (self.weight.shape[1],)

    @property
    def shape(self) -> tuple[int, int]:
        """`(d_in, d_out)` of the weight."""
        d_in, d_out = self.weight.shape
        return d_in, d_out

    @property
    def scaled_weight(self) -> Float[Tensor, "d_in d_out"]:
        """W diag(w), in float64."""
        weight = self.weight.double()
        return weight if self.column_weights is None else weight * self.column_weights.double()

    def unscaled(self, columns: Float[Tensor, "rows d_out"]) -> Float[Tensor, "rows d_out"]:
        """Take the column weights out again."""
        return columns if self.column_weights is None else columns / self.column_weights.to(columns.dtype)

    def eigenbasis(self) -> Eigenbasis:
        """Return the eigenbasis of S W diag(w), as it is kept on disk: profiling and compression see the same digits.

        Raises:
            IllConditionedGramError: the Gram matrix cannot be factorized.
        """
        if self.basis is None:
            basis = basis_from_statistics(self.scaled_weight, self._scaled_statistics(), shrinkage=self.shrinkage)
            self.basis = Eigenbasis(
                directions=basis.directions.to(self.precision), singular_values=basis.singular_values
            )
        return self.basis

    def gram(self) -> Float[Tensor, "d_in d_in"]:
        """G, shrunk, in the computing precision."""
        assert self.statistics.gram is not None, "calibration was asked for the Gram matrix of the input"
        if self._gram is None:
            gram = shrunk_gram(self.statistics.gram.double(), self.statistics.tokens, self.shrinkage)
            self._gram = gram.to(self.precision)
        return self._gram

    def loss(self, error: float) -> float | None:
        """Expected increase of the model's loss for ‖S(W - W̃)diag(w)‖² = error, in nats per token.

        Half of it divided by the tokens: the second-order term of the loss with the diagonal of its Fisher information
        by the layer's outputs. None without column weights.

        References:
            LeCun et al., "Optimal brain damage", 1990, with the Fisher information for the Hessian.
        """
        return None if self.column_weights is None else max(0.0, error) / (2 * self.statistics.tokens)

    def _scaled_statistics(self) -> GramStatistics:
        output_gram = self.statistics.output_gram
        if output_gram is None or self.column_weights is None:
            return self.statistics
        scale = self.column_weights.to(output_gram.dtype)
        return GramStatistics(
            tokens=self.statistics.tokens,
            gram=self.statistics.gram,
            output_gram=output_gram * scale[:, None] * scale,
            input_energy=self.statistics.input_energy,
        )


def output_errors(gram: Float[Tensor, "d_in d_in"], removed: Float[Tensor, "d_in d_out"]) -> Float[Tensor, " d_out"]:
    """Diagonal of EᵀGE for E = W - W̃, in float64: the squared error of each output over the calibration tokens."""
    return (removed * (gram @ removed)).sum(dim=0, dtype=torch.float64).clamp_min(0)


def column_weights(sensitivity: Float[Tensor, " d_out"], *, by_column: bool) -> Float[Tensor, " d_out"]:
    """Column weights from sensitivities: their roots, or the root of their mean for every column.

    A column that the loss did not mind on a few windows may matter on others, so none weighs less than a hundredth of
    the mean. Where the loss minded none, all weigh next to nothing, but not nothing: relative errors stay defined, and
    squares of weighted errors far from what float32 cannot hold.

    Args:
        sensitivity: E[g²] of each output, >= 0.
        by_column: weight each output by its own.
    """
    mean = max(_LEAST_SENSITIVITY, float(sensitivity.double().mean()))
    if not by_column:
        return torch.full_like(sensitivity, math.sqrt(mean), dtype=torch.float64)
    return sensitivity.double().clamp_min(1e-4 * mean).sqrt()
