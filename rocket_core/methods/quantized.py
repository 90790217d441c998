"""Quantized candidates: a layer's weights as integer codes of a few bits, with a scale per group of inputs."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.code_format import CodeFormat, formats_for
from rocket_core.inspection.table_footprint import OUTPUTS_AT_ONCE
from rocket_core.linalg.integer_codes import RoundedWeight, Scales, scale_exponent, search_scales
from rocket_core.linalg.rounding import RoundingGram, gptq, round_weight
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors

# Outputs share nothing in rounding, so errors are measured on a sample: at least this many, and at least this share.
_SAMPLED_OUTPUTS = 128
_SAMPLED_PART = 1 / 8
# Nor does a larger sample tell more.
_MOST_SAMPLED = 4096


def profile(problem: LayerProblem) -> list[Candidate]:
    """Return a candidate for each format, by falling bytes.

    Errors are those of GPTQ alone, for wide layers on a sample of the outputs. Compression ends 10 to 30 % below them.

    Args:
        problem: the layer.
    """
    scales = _importance(problem)
    energies = scales * torch.cat(
        [output_errors(problem.gram(), problem.weight[:, part].to(problem.precision)) for part in _parts(problem)]
    )
    sample = _sample(energies)
    part, part_scales = problem.weight[:, sample].to(problem.precision).contiguous(), scales[sample]
    energy, sampled_energy = float(energies.sum()), float(energies[sample].sum())
    sampled_length = float((part.double().square().sum(dim=0) * part_scales).sum())
    gram = RoundingGram.of(problem.gram())
    candidates = []
    for code_format in formats_for(len(part)):
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
    gram = RoundingGram.of(problem.gram())
    exponent = scale_exponent(problem.weight, code_format)
    codes, scales, errors = [], [], []
    for part in _parts(problem):
        weight = problem.weight[:, part].to(problem.precision)
        rounded = round_weight(weight, gram, code_format, splitting=splitting, exponent=exponent)
        codes.append(rounded.codes)
        scales.append(rounded.scales.codes)
        errors.append(output_errors(problem.gram(), weight - rounded.weight(weight.dtype)))
    whole = RoundedWeight(
        codes=torch.cat(codes, dim=1),
        scales=Scales(codes=torch.cat(scales, dim=1), exponent=exponent, format=code_format),
    )
    return CompressedLayer(factors=whole, errors=torch.cat(errors) * _importance(problem))


def _parts(problem: LayerProblem) -> list[slice]:
    """Return the outputs in parts of limited size."""
    d_out = problem.shape[1]
    return [slice(begin, begin + OUTPUTS_AT_ONCE) for begin in range(0, d_out, OUTPUTS_AT_ONCE)]


def _importance(problem: LayerProblem) -> Float[Tensor, " d_out"]:
    """Return the weight of each output's squared error, in float64."""
    if problem.output_weights is None:
        return torch.ones(problem.shape[1], dtype=torch.float64, device=problem.weight.device)
    return problem.output_weights.double().square()


def _sample(energies: Float[Tensor, " d_out"]) -> Tensor:
    """Return indices of outputs, evenly from those of large and of small energy; all if there are few."""
    d_out = len(energies)
    number = min(d_out, _MOST_SAMPLED, max(_SAMPLED_OUTPUTS, math.ceil(_SAMPLED_PART * d_out)))
    if number == d_out:
        return torch.arange(d_out, device=energies.device)
    steps = ((torch.arange(number, device=energies.device) + 0.5) * d_out / number).long()
    return energies.argsort()[steps]
