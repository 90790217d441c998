"""Feasibility of a compression, judged from a model's headers. Loads no torch."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, assert_never

from rocket_core.config import CompressionConfig
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.inspection.checks.model_reach import LayerSizes, reach_of_headers
from rocket_core.inspection.checks.preconditions import check_ignore, check_vision, check_weights
from rocket_core.inspection.headers.model_fields import check_sizes
from rocket_core.inspection.headers.weight_summary import WeightSummary, item_bytes
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.code_format import ANY_CODES, CodeChoices
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBits, ByBytes, ByFormat, ByRatio


def check_feasible(
    settings: Mapping[str, Any],
    weights: WeightSummary,
    config: CompressionConfig,
    model: str,
    dense_file_bytes: Callable[[], int | None] = lambda: None,
) -> None:
    """Raise an error if the weights do not fit config.json, or cannot be made as small as requested.

    The check has less information than a run, and never rejects what a run accepts.

    Args:
        settings: the content of config.json.
        weights: summary of the safetensors headers.
        config: the compression; without a target any size is accepted.
        model: name of the model in messages.
        dense_file_bytes: returns what `reach_of_headers` takes; called for a size only.

    Raises:
        AlreadyQuantizedError: most weights are not plain floating-point numbers.
        CheckpointFormatError: a size in config.json exceeds what the weights hold.
        InfeasibleBudgetError: the target cannot be reached.
        InvalidConfigError: the engine does not run models in this dtype, or the model has no vision tower to include.
        UnmatchedIgnoreError: a pattern of `ignore` matches no layer.
        UnsupportedArchitectureError: the model has nothing to compress, or the engine does not run it.
    """
    check_weights(weights, model)
    check_sizes(settings, weights, model)
    check_ignore(settings, weights, config.ignore, model)
    check_vision(settings, config, model)
    check_engine(settings, item_bytes(weights, config.dtype, model), config.reader, model)
    match config.target:
        case ByRatio() as target if not config.quantizes:
            check_any_selection(weights, target)
        case (ByRatio() | ByBits()) as target:
            itemsize = item_bytes(weights, config.dtype, model)
            codes = config.code_choices
            check_any_selection(weights, target, itemsize=itemsize, quantizes=config.quantizes, codes=codes)
        case ByBytes() as target:
            reach_of_headers(settings, weights, config, dense_file_bytes=dense_file_bytes()).check(target)
        case ByFormat() | None:
            pass
        case unknown:
            assert_never(unknown)


def reach_of_layers(
    layers: Collection[Shape],
    *,
    itemsize: int,
    other_bytes: int,
    quantizes: bool = False,
    only: ByFormat | None = None,
    tables: Collection[Shape] = (),
    codes: CodeChoices = ANY_CODES,
) -> Reach:
    """Return how small layers can become that are not profiled yet.

    Without quantized candidates parameters are counted, because the fraction of bytes removed cannot exceed that of
    parameters.

    Args:
        layers: `(d_in, d_out)` of every selected layer; at least one.
        itemsize: bytes of a stored number.
        other_bytes: lower bound on the bytes of the `rocket` artifact apart from these layers and tables.
        quantizes: whether layers may be quantized.
        only: the format of every layer, if the method stores them in one.
        tables: `(d_in, d_out)` of token embedding and head, where they may be quantized.
        codes: the formats that quantized layers may have.
    """
    sizes = LayerSizes(itemsize=itemsize, counts_bytes=quantizes or only is not None, only=only, codes=codes)
    known = [*sizes.of_each(layers), *(sizes.table(*shape) for shape in tables)]
    return sizes.reach(known, other_bytes=other_bytes)


def check_any_selection(
    weights: WeightSummary,
    target: ByRatio | ByBits,
    *,
    itemsize: int = 1,
    quantizes: bool = False,
    codes: CodeChoices = ANY_CODES,
) -> None:
    """Raise an error if a target cannot be reached, whichever of a model's weights are the compressible layers.

    If each layer keeps more than its share of the budget, so does every sum of layers. A weight may be stored in either
    orientation; the one that keeps less is used.

    Args:
        weights: summary of the safetensors headers.
        target: the ratio, or the bits per weight.
        itemsize: bytes of a stored number; of no account for a ratio of parameters.
        quantizes: whether layers may be quantized.
        codes: the formats that they may have.

    Raises:
        InfeasibleBudgetError: no layer's profile reaches the target.
    """
    sizes = LayerSizes(itemsize=itemsize, counts_bytes=quantizes, codes=codes)
    shapes = {shape: count for shape, count in weights.block_shapes.items() if min(shape) > 0}
    if not any(sizes.reach([sizes.either_way(shape, 1)]).allows(target) for shape in shapes):
        sizes.reach([sizes.either_way(shape, count) for shape, count in shapes.items()]).check(target)
