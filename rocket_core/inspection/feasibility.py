"""Feasibility of a compression, judged from a model's headers. Loads no torch."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, assert_never

from rocket_core import budget
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS, CompressionConfig
from rocket_core.inspection.footprint import ModelShape, describe_model
from rocket_core.inspection.model_fields import check_sizes
from rocket_core.inspection.preconditions import MAX_SHAPES, check_ignore, check_weights
from rocket_core.inspection.safetensors_headers import WeightSummary
from rocket_core.reachability import Reach
from rocket_core.target import ByBytes, ByRatio

Shape = tuple[int, int]
"""Input and output features of a layer."""


def check_feasible(settings: Mapping[str, Any], weights: WeightSummary, config: CompressionConfig, model: str) -> None:
    """Raise an error if the weights do not fit config.json, or cannot be made as small as requested.

    The check has less information than a run, and never rejects what a run accepts.

    Args:
        settings: the content of config.json.
        weights: summary of the safetensors headers.
        config: the compression; without a target any size is accepted.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: most weights are not plain floating-point numbers.
        CheckpointFormatError: a size in config.json exceeds what the weights hold.
        InfeasibleBudgetError: the ratio or the size cannot be reached.
        UnmatchedIgnoreError: a pattern of `ignore` matches no layer.
        UnsupportedArchitectureError: the model has nothing to compress.
    """
    check_weights(weights, model)
    check_sizes(settings, weights, model)
    check_ignore(settings, weights, config.ignore, model)
    match config.target:
        case ByRatio() as target:
            check_any_selection(weights, target)
        case ByBytes() as target:
            reach_of_model(describe_model(settings, weights, ignore=config.ignore, dtype=config.dtype)).check(target)
        case None:
            pass
        case unknown:
            assert_never(unknown)


def reach_of_layers(layers: Collection[Shape], *, itemsize: int, other_bytes: int) -> Reach:
    """Return how small layers can become that are not profiled yet.

    Parameters are counted, because the fraction of bytes removed cannot exceed that of parameters.

    Args:
        layers: `(d_in, d_out)` of every selected layer; at least one.
        itemsize: bytes of a stored number.
        other_bytes: lower bound on the bytes of the factored artifact apart from these layers.
    """
    return Reach(
        unit="parameters",
        dense=sum(d_in * d_out for d_in, d_out in layers),
        smallest=sum(_fewest_kept(*shape)[0] for shape in layers),
        certain=sum(_fewest_kept(*shape)[1] for shape in layers),
        unit_bytes=itemsize,
        other_bytes=other_bytes,
    )


def reach_of_model(model: ModelShape) -> Reach:
    """Return how small a model can become whose layers are not profiled yet."""
    return reach_of_layers(model.shapes, itemsize=model.itemsize, other_bytes=model.other_bytes)


def check_any_selection(weights: WeightSummary, target: ByRatio) -> None:
    """Raise an error if a ratio cannot be reached, whichever of a model's weights are the compressible layers.

    If each layer keeps more than its share of the budget, so does every sum of layers. A weight may be stored in either
    orientation; the one that keeps less is used.

    Raises:
        InfeasibleBudgetError: no layer's profile reaches the ratio.
    """
    shapes = {shape: count for shape, count in weights.block_shapes.items() if min(shape) > 0}
    if not any(_reach_either_way(shape, 1).allows(target) for shape in shapes):
        reaches = [_reach_either_way(shape, count) for shape, count in shapes.items()]
        Reach(
            unit="parameters",
            dense=sum(reach.dense for reach in reaches),
            smallest=sum(reach.smallest for reach in reaches),
            certain=sum(reach.certain for reach in reaches),
        ).check(target)


def _reach_either_way(shape: Shape, count: int) -> Reach:
    one, other = _fewest_kept(*shape), _fewest_kept(*reversed(shape))
    return Reach(
        unit="parameters",
        dense=count * shape[0] * shape[1],
        smallest=count * min(one[0], other[0]),
        certain=count * max(one[1], other[1]),
    )


@lru_cache(maxsize=4 * MAX_SHAPES)
def _fewest_kept(d_in: int, d_out: int) -> tuple[int, int]:
    """Return the fewest parameters that a layer's profile may keep, and the fewest that it is guaranteed to offer."""
    kept = [
        [budget.kept_parameters(d_in, *shape) for shape in shapes]
        for shapes in (budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS) for ratio in PROFILE_RATIOS)
        if shapes
    ]
    dense = d_in * d_out
    return min(map(min, kept), default=dense), min(map(max, kept), default=dense)
