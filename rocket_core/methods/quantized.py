"""Quantized candidates: a layer's weights as integer codes of a few bits, with a scale per group of inputs."""

from collections.abc import Sequence

import torch

from rocket_core.candidates import Candidate
from rocket_core.linalg.integer_codes import RoundedWeight, Scales, scale_exponent, search_scales
from rocket_core.linalg.rounding import gptq_each, round_weight
from rocket_core.methods import blocks
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors
from rocket_core.methods.sampled_outputs import SampledOutputs, output_importance, parts_of_outputs
from rocket_core.sizes.code_format import CodeChoices, CodeFormat, formats_for


def profile(problem: LayerProblem, sample: SampledOutputs, formats: Sequence[CodeFormat]) -> list[Candidate]:
    """Return a candidate for each of the formats, by falling bytes.

    Errors are those of GPTQ alone, for wide layers on a sample of the outputs. Compression ends 10 to 30 % below them.

    Args:
        problem: the layer.
        sample: its outputs, or some of them.
        formats: the formats.
    """
    importance = sample.gram.matrix.diagonal()
    scales = [search_scales(sample.weight, importance, code_format) for code_format in formats]
    candidates = [
        candidate_of(problem, rounded.scales.format, **sample.errors_of(rounded))
        for rounded in gptq_each(sample.weight, sample.gram, scales)
    ]
    return sorted(candidates, key=lambda candidate: -candidate.stored_bytes)


def profile_choices(problem: LayerProblem, sample: SampledOutputs, choices: CodeChoices) -> list[Candidate]:
    """Return a candidate for each format that the layer may have; see `profile`."""
    if choices.blocks:
        return blocks.profile(problem, sample)
    return profile(problem, sample, formats_for(problem.shape[0], choices))


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
    gram = problem.prepared_gram().rounding
    exponent = scale_exponent(problem.weight, code_format)
    codes, scales, errors = [], [], []
    for part in parts_of_outputs(problem):
        weight = problem.weight[:, part].to(problem.precision)
        rounded = round_weight(weight, gram, code_format, splitting=splitting, exponent=exponent)
        codes.append(rounded.codes)
        scales.append(rounded.scales.codes)
        errors.append(output_errors(problem.gram(), weight - rounded.weight(weight.dtype)))
    whole = RoundedWeight(
        codes=torch.cat(codes, dim=1),
        scales=Scales(codes=torch.cat(scales, dim=1), exponent=exponent, format=code_format),
    )
    return CompressedLayer(factors=whole, errors=torch.cat(errors) * output_importance(problem))
