"""Quantized candidates: integer codes of a few bits with a scale per group of inputs, or block types of llama.cpp."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.linalg.block_codes import BlockWeight
from rocket_core.linalg.block_rounding import round_to_blocks
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.code_grids import Grid, RoundedT
from rocket_core.linalg.integer_codes import RoundedWeight, exponent_above, scale_exponent, search_scales
from rocket_core.linalg.rounding import gptq_and_errors, round_to_nearest, round_weight
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem
from rocket_core.methods.sampled_outputs import SampledOutputs, output_importance, parts_of_outputs
from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockType, block_types_for
from rocket_core.sizes.code_format import CodeChoices, CodeFormat, formats_for

_CodesT = TypeVar("_CodesT", RoundedWeight, BlockWeight)


def profile(problem: LayerProblem, sample: SampledOutputs, formats: Sequence[CodeFormat]) -> list[Candidate]:
    """Return a candidate for each of the formats, by falling bytes.

    Errors are those of GPTQ alone, for wide layers on a sample of the outputs. Compression ends 10 to 30 % below them.

    Args:
        problem: the layer.
        sample: its outputs, or some of them.
        formats: the formats.
    """
    importance, squares = _input_importance(problem), []
    for code_format in formats:
        exponent = exponent_above(sample.largest / 2 ** (code_format.bits - 1), code_format)
        scales = search_scales(sample.weight, importance, code_format, exponent=exponent)
        squares.append(_squares(sample, scales))
    candidates = [
        candidate_of(problem, code_format, **sample.errors_from(own))
        for code_format, own in zip(formats, torch.stack(squares).tolist() if squares else [], strict=True)
    ]
    return sorted(candidates, key=lambda candidate: -candidate.stored_bytes)


def profile_choices(problem: LayerProblem, sample: SampledOutputs, choices: CodeChoices) -> list[Candidate]:
    """Return a candidate for each format that the layer may have; see `profile`."""
    if choices.blocks:
        return profile_blocks(problem, sample, choices.blocks)
    return profile(problem, sample, formats_for(problem.shape[0], choices))


def profile_blocks(problem: LayerProblem, sample: SampledOutputs, types: tuple[BlockType, ...]) -> list[Candidate]:
    """Return a candidate for each of these block types that the layer can have, by falling bytes; see `profile`."""
    d_in, d_out = problem.shape
    importance = _input_importance(problem)
    block_types, squares = block_types_for(d_in, types), []
    for block_type in block_types:
        scales = search_block_scales(sample.weight, importance, BLOCK_FORMATS[block_type])
        squares.append(_squares(sample, scales))
    candidates = [
        Candidate(
            kind="quantized",
            block_type=block_type,
            kept_parameters=d_in * d_out,
            stored_bytes=BLOCK_FORMATS[block_type].stored_bytes(d_in, d_out),
            **sample.errors_from(own),
        )
        for block_type, own in zip(block_types, torch.stack(squares).tolist() if squares else [], strict=True)
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
    exponent = scale_exponent(problem.weight, code_format)
    if problem.is_uncalibrated:
        alike = _input_importance(problem)
        return _by_parts(
            problem,
            lambda weight: (
                round_to_nearest(weight, search_scales(weight, alike, code_format, exponent=exponent)),
                None,
            ),
        )
    gram = problem.prepared_gram().rounding
    return _by_parts(
        problem, lambda weight: round_weight(weight, gram, code_format, splitting=splitting, exponent=exponent)
    )


def compress_blocks(problem: LayerProblem, block_type: BlockType, *, splitting: bool) -> CompressedLayer:
    """Round the weight to a block type.

    Args:
        problem: the layer.
        block_type: how to store it.
        splitting: see `round_to_blocks`.
    """
    block_format = BLOCK_FORMATS[block_type]
    if problem.is_uncalibrated:
        alike = _input_importance(problem)
        return _by_parts(
            problem, lambda weight: (round_to_nearest(weight, search_block_scales(weight, alike, block_format)), None)
        )
    gram = problem.prepared_gram().rounding
    return _by_parts(problem, lambda weight: round_to_blocks(weight, gram, block_format, splitting=splitting))


def _by_parts(
    problem: LayerProblem, round_part: Callable[[Tensor], tuple[_CodesT, Float64[Tensor, " outputs"] | None]]
) -> CompressedLayer:
    """Round some outputs at a time.

    Args:
        problem: the layer.
        round_part: given the weight of some outputs, returns the rounding and the error of each output under the damped
            Gram matrix; None if the layer is uncalibrated.
    """
    parts, errors = [], []
    for outputs in parts_of_outputs(problem):
        weight = problem.weight[:, outputs].to(problem.precision)
        rounded, damped_errors = round_part(weight)
        removed = weight - rounded.weight(weight.dtype)
        errors.append(
            problem.unweighted_errors(removed)
            if damped_errors is None
            else problem.prepared_gram().rounding.undamped(damped_errors, removed)
        )
        parts.append(rounded)
    factors = type(parts[0]).of_parts(parts)
    return CompressedLayer(factors=factors, errors=torch.cat(errors) * output_importance(problem))


def _input_importance(problem: LayerProblem) -> Float[Tensor, " d_in"]:
    """Return the weight of each input's squared error if every entry is rounded by itself."""
    if problem.is_uncalibrated:
        return torch.ones(problem.shape[0], dtype=problem.precision, device=problem.weight.device)
    return problem.prepared_gram().rounding.matrix.diagonal()


def _squares(sample: SampledOutputs, scales: Grid[RoundedT]) -> Float64[Tensor, "2"]:
    """Return the squared errors of a sample on a grid, see `SampledOutputs.squares_of`."""
    if sample.problem.is_uncalibrated:
        return sample.squares_of(round_to_nearest(sample.weight, scales), None)
    return sample.squares_of(*gptq_and_errors(sample.weight, sample.gram, scales))
