"""Feasibility of a compression, judged from a model's headers. Loads no torch."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, assert_never

from rocket_core.config import CompressionConfig
from rocket_core.engines import ROCKET
from rocket_core.inspection.checks.context_fit import fitted
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.inspection.checks.model_reach import LayerSizes, reach_of_headers
from rocket_core.inspection.checks.preconditions import check_ignore, check_vision, check_weights
from rocket_core.inspection.headers.coded_tensors import coded_format
from rocket_core.inspection.headers.layer_names import PREFIXES, family_of
from rocket_core.inspection.headers.model_fields import check_sizes
from rocket_core.inspection.headers.weight_summary import WeightSummary, item_bytes
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.code_format import ANY_CODES, CodeChoices
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBits, ByBytes, ByFormat, ByLoss, ByRatio


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
        InvalidConfigError: the engine does not run models in this dtype, the model has no vision tower to include, or
            is as small as requested.
        UnmatchedIgnoreError: a pattern of `ignore` matches no layer.
        UnsupportedArchitectureError: the model has nothing to compress, or the engine does not run it.
    """
    check_weights(weights, model)
    check_sizes(settings, weights, model)
    check_ignore(settings, weights, config.ignore, model)
    check_vision(settings, config, model)
    itemsize = item_bytes(weights, config.dtype, model)
    check_engine(settings, itemsize, config.reader, model)
    config = fitted(config, settings, itemsize, model)
    match config.target:
        case ByBytes() as target:
            reach = reach_of_headers(settings, weights, config, dense_file_bytes=dense_file_bytes())
        case (ByRatio() | ByBits()) as target:
            if family_of(settings) not in PREFIXES and any_selection_allows(weights, target, config, itemsize):
                return
            reach = reach_of_headers(settings, weights, config)
        case ByFormat() | ByLoss() | None:
            return
        case unknown:
            assert_never(unknown)
    reach.check(target)
    is_coded = coded_format(settings, model) is not None
    if may_be_needless(config, is_coded=is_coded):
        reach.check_needed(target, stored_bytes=weights.stored_bytes if is_coded else None)


def may_be_needless(config: CompressionConfig, *, is_coded: bool) -> bool:
    """Return whether a target that the model meets leaves nothing to do: neither a dtype nor the format changes.

    Args:
        config: the compression.
        is_coded: whether the checkpoint stores weights in few bits, which other engines do not read.
    """
    return config.dtype == "auto" and (config.reader is ROCKET or not is_coded)


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


def any_selection_allows(
    weights: WeightSummary, target: ByRatio | ByBits, config: CompressionConfig, itemsize: int
) -> bool:
    """Return whether a target can be reached for some of a model's weights, as they may not all be compressible layers.

    If each layer keeps more than its share of the budget, so does every sum of layers. A weight may be stored in either
    orientation; the one that keeps less is used.

    Args:
        weights: summary of the safetensors headers.
        target: the ratio, or the bits per weight.
        config: the compression.
        itemsize: bytes of a stored number.
    """
    sizes = LayerSizes(itemsize=itemsize, counts_bytes=config.quantizes, codes=config.code_choices)
    shapes = [shape for shape in weights.block_shapes if min(shape) > 0]
    return any(sizes.reach([sizes.of(*way)]).allows(target) for shape in shapes for way in (shape, shape[::-1]))
