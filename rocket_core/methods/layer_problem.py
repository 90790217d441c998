"""The input of a method: a weight and the calibration statistics of its layer."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.errors import IllConditionedGramError
from rocket_core.estimates.layer_footprint import OUTPUTS_AT_ONCE
from rocket_core.layers import StoredWeight
from rocket_core.linalg.block_codes import BlockWeight
from rocket_core.linalg.least_squares import column_energies, output_errors
from rocket_core.linalg.prepared_gram import PreparedGram
from rocket_core.linalg.whitening import Eigenbasis, GramStatistics, basis_from_statistics, eigenbasis, shrunk_gram

# Small enough that a layer of any size with any error adds less to the loss than can be measured.
_LEAST_SENSITIVITY = 1e-20

CompressedWeight: TypeAlias = StoredWeight | BlockWeight
"""What a method makes of the weight of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedLayer:
    """A compressed weight.

    Attributes:
        factors: the stored form.
        errors: ‖S(w_j - w̃_j)‖² · w_j² of each output j, in float64.
    """

    factors: CompressedWeight
    errors: Float[Tensor, " d_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """What is known of a layer after its profile that a group with it needs.

    Attributes:
        energies: ‖S w_j‖² w_j² of each output j, in float64.
        loss_factors: see `LayerProblem`.
        singular_values: about those of S W diag(w); None if there is no Gram matrix of the input.
    """

    energies: Float[Tensor, " d_out"]
    loss_factors: tuple[float, ...]
    singular_values: Float[Tensor, " m"] | None


@dataclass(kw_only=True, slots=True)
class LayerProblem:
    """A weight to compress: that of one layer, or the concatenated weights of an input group.

    The error to minimise is ‖S(W - W̃)diag(w)‖², with w the output weights. A method scales W's columns by w, minimises
    the unweighted error, and scales its result back.

    Attributes:
        weight: W.
        statistics: calibration statistics of the layer.
        shrinkage: strength of the shrinkage of the Gram matrix towards its diagonal.
        precision: dtype in which supports and least squares are computed.
        output_weights: w = √E[g²] with g the gradient of the loss by each output, > 0; None if all outputs count
            equally and errors do not estimate losses.
        output_widths: output features of each layer whose weight is a part of W.
        loss_factors: what the loss from an error of each of these layers is multiplied by, see
            `rocket_core.methods.held_out`; empty for 1. Those of the members if there are any.
        basis: the eigenbasis of S W diag(w), computed in float64; None until it is first needed.
        prepared: G after shrinkage, with what is derived from it; None until it is first needed. Layers that read the
            same input can have the same.
        members: what is known of each layer, if the problem is of several.
    """

    weight: Float[Tensor, "d_in d_out"]
    statistics: GramStatistics
    shrinkage: float
    precision: torch.dtype
    output_weights: Float[Tensor, " d_out"] | None = None
    output_widths: tuple[int, ...] = ()
    loss_factors: tuple[float, ...] = ()
    basis: Eigenbasis | None = None
    prepared: PreparedGram | None = field(default=None, repr=False)
    members: tuple[Member, ...] = field(default=(), repr=False)
    _energies: Tensor | None = field(default=None, repr=False)
    _rough_basis: Eigenbasis | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.output_widths = self.output_widths or (self.weight.shape[1],)
        if self.members:
            self._energies = torch.cat([member.energies for member in self.members])
            factors = [member.loss_factors for member in self.members]
            self.loss_factors = tuple(itertools.chain(*factors)) if all(factors) else ()

    @property
    def shape(self) -> tuple[int, int]:
        """`(d_in, d_out)` of the weight."""
        d_in, d_out = self.weight.shape
        return d_in, d_out

    @property
    def is_uncalibrated(self) -> bool:
        """Whether nothing is known of the inputs, so that G is the identity, which is nowhere formed.

        Layers whose eigenbasis was computed before come without statistics too.
        """
        return self.statistics.gram is None and self.statistics.output_gram is None and self.basis is None

    @property
    def scaled_weight(self) -> Float[Tensor, "d_in d_out"]:
        """W diag(w), in float64."""
        weight = self.weight.double()
        return weight if self.output_weights is None else weight * self.output_weights.double()

    def unscaled(self, columns: Float[Tensor, "rows d_out"]) -> Float[Tensor, "rows d_out"]:
        """Divide columns by the output weights."""
        return columns if self.output_weights is None else columns / self.output_weights.to(columns.dtype)

    def eigenbasis(self) -> Eigenbasis:
        """Return the eigenbasis of S W diag(w), rounded as on disk, so profiling and compression use equal numbers.

        Raises:
            IllConditionedGramError: the Gram matrix cannot be factorized.
        """
        if self.basis is None:
            basis = basis_from_statistics(self.scaled_weight, self._scaled_statistics(), shrinkage=self.shrinkage)
            self.basis = Eigenbasis(
                directions=basis.directions.to(self.precision), singular_values=basis.singular_values
            )
        return self.basis

    def rough_basis(self) -> Eigenbasis:
        """Return about `eigenbasis` in half of its time, from the Gram matrix of the input in the computing precision.

        It suffices for bounds, and for factors that are rounded to few bits: on layers of SmolLM2-135M their errors
        differ by 1e-4 and at most 7e-3 of themselves, as much as ties of codes make. Where the precision does not
        suffice for a matrix, `eigenbasis` is returned.

        Raises:
            IllConditionedGramError: the Gram matrix cannot be factorized in float64 either.
        """
        if self._rough_basis is None:
            try:
                self._rough_basis = eigenbasis(self.scaled_weight.to(self.precision), self.gram())
            except IllConditionedGramError:
                self._rough_basis = self.eigenbasis()
        return self._rough_basis

    def gram(self) -> Float[Tensor, "d_in d_in"]:
        """Return G after shrinkage, in the computing precision."""
        return self.prepared_gram().matrix

    def prepared_gram(self) -> PreparedGram:
        """Return G after shrinkage, in the computing precision, with what is derived from it."""
        assert self.statistics.gram is not None, "calibration was asked for the Gram matrix of the input"
        if self.prepared is None:
            gram = self.statistics.gram.to(self.precision)
            self.prepared = PreparedGram(matrix=shrunk_gram(gram, self.statistics.tokens, self.shrinkage))
        return self.prepared

    def output_energies(self) -> Float[Tensor, " d_out"]:
        """Return ‖S w_j‖² w_j² of each output j, in float64."""
        if self._energies is None:
            if self.statistics.gram is None and not self.is_uncalibrated:
                basis = self.eigenbasis()
                self._energies = basis.directions.double().square() @ basis.singular_values.double().square()
            else:
                parts = (part.to(self.precision) for part in torch.split(self.weight, OUTPUTS_AT_ONCE, dim=1))
                energies = torch.cat([self.unweighted_errors(part) for part in parts])
                weights = self.output_weights
                self._energies = energies if weights is None else energies * weights.double().square()
        return self._energies

    def as_member(self) -> Member:
        """Return what a group needs to know of this layer."""
        has_gram = self.statistics.gram is not None
        return Member(
            energies=self.output_energies(),
            loss_factors=self.loss_factors,
            singular_values=self.rough_basis().singular_values if has_gram else None,
        )

    def unweighted_errors(self, removed: Float[Tensor, "d_in outputs"]) -> Float[Tensor, " outputs"]:
        """Return ‖S(w_j - w̃_j)‖² of some outputs, in float64, given their part of W - W̃."""
        if self.is_uncalibrated:
            return column_energies(removed)
        return output_errors(self.gram(), removed)

    def predicted_loss_increase(self, error: float, *, member: int = 0) -> float | None:
        """Return the expected increase of the model's loss for ‖S(W - W̃)diag(w)‖² = error, in nats per token.

        This is half the error divided by the tokens: the second-order term of the loss, with the diagonal of its Fisher
        information with respect to the layer's outputs, times the loss factor. None without output weights.

        Args:
            error: the error of the whole weight, or of a member's part of it.
            member: index of the layer among those whose weights are concatenated.

        References:
            LeCun et al., "Optimal brain damage", 1990, with the Fisher information for the Hessian.
        """
        if self.output_weights is None:
            return None
        factor = self.loss_factors[member] if self.loss_factors else 1.0
        return factor * max(0.0, error) / (2 * self.statistics.tokens)

    def _scaled_statistics(self) -> GramStatistics:
        output_gram = self.statistics.output_gram
        if output_gram is None or self.output_weights is None:
            return self.statistics
        scale = self.output_weights.to(output_gram.dtype)
        return replace(self.statistics, output_gram=output_gram * scale[:, None] * scale)


def relative_error(error: float, energy: float) -> float:
    """Return the root of a squared error relative to an energy; 0 without energy, or if rounding left less than 0."""
    return (max(error, 0.0) / energy) ** 0.5 if energy > 0 else 0.0


def output_weights(fisher_diagonal: Float[Tensor, " d_out"], *, per_output: bool) -> Float[Tensor, " d_out"]:
    """Compute output weights from the Fisher diagonal: its roots, or the root of its mean for every output.

    An output that the loss did not depend on in a few windows may matter in others, so each weight is at least a
    hundredth of that of the mean. If the loss depends on no column, all weights are tiny but positive, so that relative
    errors stay defined and squares of weighted errors stay within the range of float32.

    Args:
        fisher_diagonal: E[g²] of each output, >= 0.
        per_output: weight each output by its own entry.
    """
    mean = max(_LEAST_SENSITIVITY, float(fisher_diagonal.double().mean()))
    if not per_output:
        return torch.full_like(fisher_diagonal, math.sqrt(mean), dtype=torch.float64)
    return fisher_diagonal.double().clamp_min(1e-4 * mean).sqrt()
