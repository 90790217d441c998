"""A sample of a layer's outputs, on which candidates of integer codes are measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from rocket_core.estimates.layer_footprint import OUTPUTS_AT_ONCE
from rocket_core.linalg.code_grids import RoundedCodes
from rocket_core.linalg.least_squares import column_energies
from rocket_core.linalg.rounding import RoundingGram
from rocket_core.methods.layer_problem import LayerProblem, relative_error

# Outputs share nothing in rounding, so errors are measured on a sample: at least this many, and at least this share.
_SAMPLED_OUTPUTS = 128
_SAMPLED_PART = 1 / 8
# Nor does a larger sample tell more.
_MOST_SAMPLED = 4096
# The outputs with the largest weight norms are always sampled: those that carry massive activations can have most of
# the error, which is only known once they are rounded.
_LARGEST = 4
# Without calibration, all outputs of a layer have about the same relative error.
_MOST_UNCALIBRATED = 32


class CandidateErrors(TypedDict):
    """The errors of a candidate, see `Candidate`."""

    reconstruction_error: float
    weight_error: float
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledOutputs:
    """Some outputs of a layer, or all of them if there are few.

    Attributes:
        problem: the layer.
        outputs: indices of the sample.
        weight: their part of the weight, in the computing precision.
        importance: weight of each output's squared error, in float64.
        energy: weighted squared norm of all outputs over the calibration tokens.
        multipliers: factor of each sampled output's error in the estimate for all outputs: 1 for those with the largest
            weight norms, and the inverse of the sample's share of the squared norms for the others, as the step of
            codes, and so their error, is proportional to the norm.
        weight_energy: weighted squared norm of the sample's weight.
        largest: largest absolute entry of the sample's weight.
    """

    problem: LayerProblem
    outputs: Int64[Tensor, " sampled"]
    weight: Float[Tensor, "d_in sampled"]
    importance: Float[Tensor, " sampled"]
    energy: float
    multipliers: Float[Tensor, " sampled"]
    weight_energy: float
    largest: float

    @classmethod
    def of(cls, problem: LayerProblem) -> "SampledOutputs":
        """Take the sample of a layer."""
        importance = output_importance(problem)
        energies = problem.output_energies()
        lengths = importance * column_energies(problem.weight)
        most = _MOST_UNCALIBRATED if problem.is_uncalibrated else _MOST_SAMPLED
        outputs, multipliers = _sample(energies, lengths, most)
        weight = problem.weight[:, outputs].to(problem.precision).contiguous()
        sums = [energies.sum(), squared_norm(weight, importance[outputs]), weight.abs().amax()]
        energy, weight_energy, largest = torch.stack(sums).tolist()
        return cls(
            problem=problem,
            outputs=outputs,
            weight=weight,
            importance=importance[outputs],
            energy=energy,
            multipliers=multipliers,
            weight_energy=weight_energy,
            largest=largest,
        )

    @property
    def gram(self) -> RoundingGram:
        """The layer's Gram matrix, prepared for rounding."""
        return self.problem.prepared_gram().rounding

    def squares_of(
        self, rounded: RoundedCodes, damped_errors: Float[Tensor, " sampled"] | None
    ) -> Float64[Tensor, "2"]:
        """Return the weighted squared errors of all outputs and of the sample's weight, on the device.

        Args:
            rounded: what the sample is rounded to.
            damped_errors: its errors under the damped matrix, as `gptq_and_errors` returns them; None if the Gram
                matrix is the identity.
        """
        removed = self.weight - rounded.weight(self.weight.dtype)
        distances = column_energies(removed)
        errors = distances if damped_errors is None else self.gram.undamped(damped_errors, removed)
        return torch.stack([errors @ (self.importance * self.multipliers), distances @ self.importance])

    def errors_from(self, squares: Sequence[float]) -> CandidateErrors:
        """Return the errors of the layer if all of its outputs are rounded as the sample, from `squares_of`."""
        return CandidateErrors(
            reconstruction_error=relative_error(squares[0], self.energy),
            weight_error=relative_error(squares[1], self.weight_energy),
            loss=self.problem.predicted_loss_increase(squares[0]),
        )


def squared_norm(columns: Float[Tensor, "d_in outputs"], importance: Float[Tensor, " outputs"]) -> Float64[Tensor, ""]:
    """Return the squared norm of a matrix, given the importance of each column, on the device."""
    return (columns.double().square().sum(dim=0) * importance).sum()


def parts_of_outputs(problem: LayerProblem) -> list[slice]:
    """Return the outputs of a layer in parts of limited size."""
    return [slice(begin, begin + OUTPUTS_AT_ONCE) for begin in range(0, problem.shape[1], OUTPUTS_AT_ONCE)]


def output_importance(problem: LayerProblem) -> Float[Tensor, " d_out"]:
    """Return the weight of each output's squared error, in float64."""
    if problem.output_weights is None:
        return torch.ones(problem.shape[1], dtype=torch.float64, device=problem.weight.device)
    return problem.output_weights.double().square()


def _sample(
    energies: Float[Tensor, " d_out"], lengths: Float[Tensor, " d_out"], most: int
) -> tuple[Int64[Tensor, " sampled"], Float[Tensor, " sampled"]]:
    """Return indices and multipliers of the outputs to sample: all outputs of a small layer.

    Otherwise those with the largest norms, and others spread evenly over the ranks by energy.
    """
    d_out = len(energies)
    number = min(d_out, most, max(_SAMPLED_OUTPUTS, math.ceil(_SAMPLED_PART * d_out)))
    if number == d_out:
        return torch.arange(d_out, device=energies.device), torch.ones_like(lengths)
    order = lengths.argsort(descending=True)
    largest, others = order[:_LARGEST], order[_LARGEST:]
    spread = others[spread_outputs(energies[others], number - _LARGEST)]
    multiplier = (lengths[others].sum() / lengths[spread].sum()).nan_to_num(1.0, 1.0)
    multipliers = torch.cat([torch.ones_like(lengths[largest]), multiplier.expand(len(spread))])
    return torch.cat([largest, spread]), multipliers


def spread_outputs(energies: Float[Tensor, " d_out"], number: int) -> Int64[Tensor, " sampled"]:
    """Return indices of some outputs, evenly from those of large and of small energy."""
    steps = (torch.arange(number, device=energies.device) + 0.5) * len(energies) / number
    return energies.argsort()[steps.long()]
