"""A sample of a layer's outputs, on which candidates of integer codes are measured."""

import math
from dataclasses import dataclass
from typing import TypedDict

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rocket_core.estimates.layer_footprint import OUTPUTS_AT_ONCE
from rocket_core.linalg.code_grids import RoundedCodes
from rocket_core.linalg.least_squares import output_errors
from rocket_core.linalg.rounding import RoundingGram
from rocket_core.methods.layer_problem import LayerProblem, relative_error

# Outputs share nothing in rounding, so errors are measured on a sample: at least this many, and at least this share.
_SAMPLED_OUTPUTS = 128
_SAMPLED_PART = 1 / 8
# Nor does a larger sample tell more.
_MOST_SAMPLED = 4096


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
        gram: its Gram matrix, prepared for rounding.
        outputs: indices of the sample.
        weight: their part of the weight, in the computing precision.
        importance: weight of each output's squared error, in float64.
        energy: weighted squared norm of all outputs over the calibration tokens.
        share: share of the sample in the errors of all outputs. The step of codes, and so their error, is proportional
            to the norm of an output's weights; the energy of an output may be far larger, in the few that carry massive
            activations.
    """

    problem: LayerProblem
    gram: RoundingGram
    outputs: Int64[Tensor, " sampled"]
    weight: Float[Tensor, "d_in sampled"]
    importance: Float[Tensor, " sampled"]
    energy: float
    share: float

    @classmethod
    def of(cls, problem: LayerProblem) -> "SampledOutputs":
        """Take the sample of a layer."""
        importance = output_importance(problem)
        energies = problem.output_energies()
        outputs = _sample(energies)
        lengths = importance * problem.weight.square().sum(dim=0, dtype=torch.float64)
        return cls(
            problem=problem,
            gram=problem.prepared_gram().rounding,
            outputs=outputs,
            weight=problem.weight[:, outputs].to(problem.precision).contiguous(),
            importance=importance[outputs],
            energy=float(energies.sum()),
            share=relative_error(float(lengths[outputs].sum()), float(lengths.sum())) ** 2 or 1.0,
        )

    def errors_of(self, rounded: RoundedCodes) -> CandidateErrors:
        """Return the errors of the layer if all of its outputs are rounded as the sample is."""
        removed = self.weight - rounded.weight(self.weight.dtype)
        error = float((output_errors(self.problem.gram(), removed) * self.importance).sum()) / self.share
        return CandidateErrors(
            reconstruction_error=relative_error(error, self.energy),
            weight_error=weight_error(removed, self.weight, self.importance),
            loss=self.problem.predicted_loss_increase(error),
        )


def weight_error(
    removed: Float[Tensor, "d_in outputs"], weight: Float[Tensor, "d_in outputs"], importance: Float[Tensor, " outputs"]
) -> float:
    """Return the relative error of a weight, given what is removed from it and the importance of each output."""
    distance, length = (float((part.double().square().sum(dim=0) * importance).sum()) for part in (removed, weight))
    return relative_error(distance, length)


def parts_of_outputs(problem: LayerProblem) -> list[slice]:
    """Return the outputs of a layer in parts of limited size."""
    return [slice(begin, begin + OUTPUTS_AT_ONCE) for begin in range(0, problem.shape[1], OUTPUTS_AT_ONCE)]


def output_importance(problem: LayerProblem) -> Float[Tensor, " d_out"]:
    """Return the weight of each output's squared error, in float64."""
    if problem.output_weights is None:
        return torch.ones(problem.shape[1], dtype=torch.float64, device=problem.weight.device)
    return problem.output_weights.double().square()


def _sample(energies: Float[Tensor, " d_out"]) -> Int64[Tensor, " sampled"]:
    """Return indices of outputs, evenly from those of large and of small energy; all if there are few."""
    d_out = len(energies)
    number = min(d_out, _MOST_SAMPLED, max(_SAMPLED_OUTPUTS, math.ceil(_SAMPLED_PART * d_out)))
    return torch.arange(d_out, device=energies.device) if number == d_out else spread_outputs(energies, number)


def spread_outputs(energies: Float[Tensor, " d_out"], number: int) -> Int64[Tensor, " sampled"]:
    """Return indices of some outputs, evenly from those of large and of small energy."""
    steps = (torch.arange(number, device=energies.device) + 0.5) * len(energies) / number
    return energies.argsort()[steps.long()]
