"""Feasibility of a compression, judged from a model's headers. Loads no torch."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never

from rocket_core import budget
from rocket_core.code_format import ANY_CODES, CodeChoices, fewest_bytes, fewest_coded_bytes
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS, CompressionConfig
from rocket_core.inspection.engine_limits import check_engine
from rocket_core.inspection.footprint import ModelShape, describe_model, item_bytes
from rocket_core.inspection.model_fields import check_sizes
from rocket_core.inspection.preconditions import MAX_SHAPES, check_ignore, check_vision, check_weights
from rocket_core.inspection.safetensors_headers import WeightSummary
from rocket_core.reachability import Reach
from rocket_core.target import ByBits, ByBytes, ByFormat, ByRatio

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
            described = describe_model(
                settings, weights, ignore=config.ignore, dtype=config.dtype, vision=config.includes_vision
            )
            codes = config.code_choices
            reach_of_model(described, quantizes=config.quantizes, tables=config.decides_tables, codes=codes).check(
                target
            )
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
    table_parameters: int = 0,
    codes: CodeChoices = ANY_CODES,
) -> Reach:
    """Return how small layers can become that are not profiled yet.

    Without quantized candidates parameters are counted, because the fraction of bytes removed cannot exceed that of
    parameters.

    Args:
        layers: `(d_in, d_out)` of every selected layer; at least one.
        itemsize: bytes of a stored number.
        other_bytes: lower bound on the bytes of the factored artifact apart from these layers.
        quantizes: whether layers may be quantized.
        only: the format of every layer, if the method stores them in one.
        table_parameters: upper bound on the parameters of token tables that may be quantized as well, but need not be
            possible to quantize; their bytes when dense are among `other_bytes`.
        codes: the formats that quantized layers may have.
    """
    sizes = _Sizes(itemsize=itemsize, counts_bytes=quantizes or only is not None, only=only, codes=codes)
    known = [sizes.of(*shape) for shape in layers]
    if table_parameters and quantizes:
        tables = table_parameters * itemsize
        fewest = math.floor(table_parameters * codes.fewest_bits / 8)
        known.append(_Size(dense=tables, smallest=fewest, certain=tables, parameters=table_parameters))
        other_bytes -= tables
    return sizes.reach(known, other_bytes=other_bytes)


def reach_of_model(
    model: ModelShape,
    *,
    quantizes: bool = False,
    only: ByFormat | None = None,
    tables: bool = False,
    codes: CodeChoices = ANY_CODES,
) -> Reach:
    """Return how small a model can become whose layers are not profiled yet; see `reach_of_layers`.

    Args:
        model: the model's sizes.
        quantizes: whether layers may be quantized.
        only: the format of every layer, if the method stores them in one.
        tables: whether token embedding and head may be quantized. Which parameters these are is not known, so that all
            outside of the blocks may be theirs.
        codes: the formats that quantized layers may have.
    """
    return reach_of_layers(
        model.shapes,
        itemsize=model.itemsize,
        other_bytes=model.other_bytes,
        quantizes=quantizes,
        only=only,
        table_parameters=max(0, model.parameters - sum(model.block_parameters)) if tables else 0,
        codes=codes,
    )


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
    sizes = _Sizes(itemsize=itemsize, counts_bytes=quantizes, codes=codes)
    shapes = {shape: count for shape, count in weights.block_shapes.items() if min(shape) > 0}
    if not any(sizes.reach([sizes.either_way(shape, 1)]).allows(target) for shape in shapes):
        sizes.reach([sizes.either_way(shape, count) for shape, count in shapes.items()]).check(target)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """What a layer keeps when dense, at least, and at most if it is made as small as possible; see `Reach`."""

    dense: int
    smallest: int
    certain: int
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Sizes of layers: in bytes if they may be quantized, otherwise in parameters.

    Attributes:
        itemsize: bytes of a stored number.
        counts_bytes: whether layers may be quantized, so that sizes are in bytes.
        only: the format of every layer, if the method stores them in one.
        codes: the formats that quantized layers may have.
    """

    itemsize: int
    counts_bytes: bool
    only: ByFormat | None = None
    codes: CodeChoices = ANY_CODES

    def of(self, d_in: int, d_out: int) -> _Size:
        """Return the size of a layer."""
        parameters = d_in * d_out
        dense = parameters * self.itemsize
        if self.only is not None:
            smallest = min(dense, self.only.code_format(d_in).stored_bytes(d_in, d_out))
            return _Size(dense=dense, smallest=smallest, certain=smallest, parameters=parameters)
        smallest, certain = _fewest_kept(d_in, d_out)
        if not self.counts_bytes:
            return _Size(dense=parameters, smallest=smallest, certain=certain, parameters=parameters)
        fewest_codes = fewest_bytes(d_in, d_out, self.codes)
        codes = dense if fewest_codes is None else min(dense, fewest_codes)
        # Masks are not counted, and what entropy coding saves is not known, so that only
        # codes are certain.
        fewest = codes if self.codes.alone else min(codes, smallest * self.itemsize)
        if self.codes.smaller:
            fewest = min(fewest, fewest_coded_bytes(d_in, d_out))
        return _Size(dense=dense, smallest=fewest, certain=codes, parameters=parameters)

    def either_way(self, shape: Shape, count: int) -> _Size:
        """Return the size of a number of weights whose orientation is unknown."""
        one, other = self.of(*shape), self.of(*reversed(shape))
        return _Size(
            dense=count * one.dense,
            smallest=count * min(one.smallest, other.smallest),
            certain=count * max(one.certain, other.certain),
            parameters=count * one.parameters,
        )

    def reach(self, sizes: Collection[_Size], *, other_bytes: int = 0) -> Reach:
        """Return the reach of layers together."""
        return Reach(
            unit="bytes" if self.counts_bytes else "parameters",
            dense=sum(size.dense for size in sizes),
            smallest=sum(size.smallest for size in sizes),
            certain=sum(size.certain for size in sizes),
            parameters=sum(size.parameters for size in sizes),
            unit_bytes=1 if self.counts_bytes else self.itemsize,
            other_bytes=other_bytes,
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
