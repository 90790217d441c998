"""Quantized candidates: a layer's weights as integer codes of a few bits, with a scale per group of inputs."""

from collections.abc import Sequence

from rocket_core.candidates import Candidate
from rocket_core.code_format import CodeFormat
from rocket_core.linalg.integer_codes import RoundedWeight, search_scales
from rocket_core.linalg.rounding import RoundingGram, gptq_each, round_weight
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors
from rocket_core.methods.sampled_outputs import SampledOutputs, output_importance


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
    return CompressedLayer(factors=rounded, errors=errors * output_importance(problem))
