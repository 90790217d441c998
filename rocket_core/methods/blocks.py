"""Quantized candidates in the block types of llama.cpp."""

import torch

from rocket_core.candidates import Candidate
from rocket_core.linalg.block_codes import BlockWeight
from rocket_core.linalg.block_rounding import round_to_blocks
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import gptq
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors
from rocket_core.methods.sampled_outputs import SampledOutputs, output_importance, parts_of_outputs
from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockType, block_types_for


def profile(problem: LayerProblem, sample: SampledOutputs) -> list[Candidate]:
    """Return a candidate for each block type that rows of the layer can have, by falling bytes.

    Errors are those of GPTQ alone, for wide layers on a sample of the outputs.

    Args:
        problem: the layer.
        sample: its outputs, or some of them.
    """
    d_in, d_out = problem.shape
    importance = sample.gram.matrix.diagonal()
    candidates = []
    for block_type in block_types_for(d_in):
        block_format = BLOCK_FORMATS[block_type]
        scales = search_block_scales(sample.weight, importance, block_format)
        candidates.append(
            Candidate(
                kind="quantized",
                block_type=block_type,
                kept_parameters=d_in * d_out,
                stored_bytes=block_format.stored_bytes(d_in, d_out),
                **sample.errors_of(gptq(sample.weight, sample.gram, scales)),
            )
        )
    return sorted(candidates, key=lambda candidate: -candidate.stored_bytes)


def compress(problem: LayerProblem, block_type: BlockType, *, splitting: bool) -> CompressedLayer:
    """Round the weight.

    Args:
        problem: the layer.
        block_type: how to store it.
        splitting: see `round_to_blocks`.
    """
    gram, block_format = problem.prepared_gram().rounding, BLOCK_FORMATS[block_type]
    parts, errors = [], []
    for part in parts_of_outputs(problem):
        weight = problem.weight[:, part].to(problem.precision)
        rounded = round_to_blocks(weight, gram, block_format, splitting=splitting)
        parts.append(rounded)
        errors.append(output_errors(problem.gram(), weight - rounded.weight(weight.dtype)))
    return CompressedLayer(factors=BlockWeight.of_parts(parts), errors=torch.cat(errors) * output_importance(problem))
