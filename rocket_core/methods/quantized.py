"""Quantized candidates: a layer's weights as integer codes of a few bits, with a scale per group of inputs."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.code_format import CodeFormat, formats_for
from rocket_core.linalg.integer_codes import RoundedWeight, search_scales
from rocket_core.linalg.rounding import RoundingGram, gptq, round_weight
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors

# Outputs share nothing in rounding, so errors are measured on a sample: at least this many, and at least this share.
_SAMPLED_OUTPUTS = 128
_SAMPLED_PART = 1 / 8


def profile(problem: LayerProblem) -> list[Candidate]:
    """Return a candidate for each format, by falling bytes.

    Errors are those of GPTQ alone, for wide layers on a sample of the outputs. Compression ends 10 to 30 % below them.

    Args:
        problem: the layer.
    """
    weight = problem.weight.to(problem.precision)
    scales = _importance(problem)
    energies = output_errors(problem.gram(), weight) * scales
    sample = _sample(energies)
    part, part_scales = weight[:, sample].contiguous(), scales[sample]
    energy, sampled_energy = float(energies.sum()), float(energies[sample].sum())
    sampled_length = float((part.double().square().sum(dim=0) * part_scales).sum())
    gram = RoundingGram.of(problem.gram())
    candidates = []
    for code_format in formats_for(len(weight)):
        rounded = gptq(part, gram, search_scales(part, gram.matrix.diagonal(), code_format)).weight(part.dtype)
        removed = part - rounded
        error = float((output_errors(problem.gram(), removed) * part_scales).sum())
        distance = float((removed.double().square().sum(dim=0) * part_scales).sum())
        relative = (error / sampled_energy) ** 0.5 if sampled_energy > 0 else 0.0
        candidates.append(
            candidate_of(
                problem,
                code_format,
                reconstruction_error=relative,
                weight_error=(distance / sampled_length) ** 0.5 if sampled_length > 0 else 0.0,
                loss=problem.predicted_loss_increase(relative**2 * energy),
            )
        )
    return sorted(candidates, key=lambda candidate: -candidate.stored_bytes)


def candidate_of(
    problem: LayerProblem,
    code_format: CodeFormat,
    *,
    reconstruction_error: float,
    weight_error: float,
    loss: float | None,
) -> Candidate:
    """Return the candidate of a format, given its errors; see `Candidate`."""
    d_in, d_out = problem.shape
    return Candidate(
        kind="quantized",
        bits=code_format.bits,
        group_size=code_format.group_size,
        scale_bits=code_format.scale_bits,
        kept_parameters=d_in * d_out,
        stored_bytes=code_format.stored_bytes(d_in, d_out),
        reconstruction_error=reconstruction_error,
        weight_error=weight_error,
        loss=loss,
    )


def compress(problem: LayerProblem, code_format: CodeFormat, *, splitting: bool) -> CompressedLayer:
    """Round the weight.

    Args:
        problem: the layer.
        code_format: how to store it.
        splitting: see `round_weight`.
    """
    weight = problem.weight.to(problem.precision)
    rounded: RoundedWeight = round_weight(weight, RoundingGram.of(problem.gram()), code_format, splitting=splitting)
    errors = output_errors(problem.gram(), weight - rounded.weight(weight.dtype))
    return CompressedLayer(factors=rounded, errors=errors * _importance(problem))


def _importance(problem: LayerProblem) -> Float[Tensor, " d_out"]:
    """Return the weight of each output's squared error, in float64."""
    if problem.output_weights is None:
        return torch.ones(problem.shape[1], dtype=torch.float64, device=problem.weight.device)
    return problem.output_weights.double().square()


def _sample(energies: Float[Tensor, " d_out"]) -> Tensor:
    """Return indices of outputs, evenly from those of large and of small energy; all if there are few."""
    d_out = len(energies)
    number = min(d_out, max(_SAMPLED_OUTPUTS, math.ceil(_SAMPLED_PART * d_out)))
    if number == d_out:
        return torch.arange(d_out, device=energies.device)
    steps = ((torch.arange(number, device=energies.device) + 0.5) * d_out / number).long()
    return energies.argsort()[steps]
