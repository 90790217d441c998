"""How small layers and a model can become, judged from shapes, config.json and headers. Loads no torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS, CompressionConfig
from rocket_core.inspection.checks.preconditions import MAX_SHAPES
from rocket_core.inspection.files.safetensors_headers import FLOAT_DTYPES
from rocket_core.inspection.headers.header_layers import HeaderTables, find_layers, find_tables
from rocket_core.inspection.headers.header_size import header_bytes, stored_parts
from rocket_core.inspection.headers.layer_names import PREFIXES, family_of, last_part
from rocket_core.inspection.headers.model_fields import find_number
from rocket_core.inspection.headers.weight_summary import ITEM_BYTES, WeightSummary, item_bytes
from rocket_core.sizes import budget
from rocket_core.sizes.budget import Shape
from rocket_core.sizes.code_format import (
    ANY_CODES,
    CodeChoices,
    fewest_bytes,
    fewest_coded_bytes,
    fewest_factor_bytes,
    most_coded_bytes,
)
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBytes, ByFormat

# Bytes that a tensor may take in a GGUF file in addition to its numbers: gaps in front of it.
_GGUF_ALIGNMENT = 32
# Bytes of the tokenizer in a GGUF file for each token, its share of the merges included: more than tokenizers of the
# families that are written for llama.cpp have (60 in that of Llama 3).
_TOKEN_BYTES = 96
# Bounds on what messages show of a checkpoint: lengths of rows, names for each, characters of a name.
_MOST_SHOWN, _MOST_CHARACTERS = 8, 64
# Last parts of the names of matrices that may be routers, which are left alone.
_ROUTERS = frozenset({"gate", "router", "wg", "classifier"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """What a layer keeps when dense, at least, and at most if it is made as small as possible; see `Reach`."""

    dense: int
    smallest: int
    certain: int
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
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

    def of_each(self, shapes: Iterable[Shape]) -> list[LayerSize]:
        """Return the sizes of layers; that of a shape is computed once."""
        found: dict[Shape, LayerSize] = {}
        return [found[shape] if shape in found else found.setdefault(shape, self.of(*shape)) for shape in shapes]

    def of(self, d_in: int, d_out: int) -> LayerSize:
        """Return the size of a layer."""
        parameters = d_in * d_out
        dense = parameters * self.itemsize
        if self.only is not None:
            smallest = min(dense, self.only.code_format(d_in).stored_bytes(d_in, d_out))
            return LayerSize(dense=dense, smallest=smallest, certain=smallest, parameters=parameters)
        smallest, certain = _fewest_kept(d_in, d_out)
        if not self.counts_bytes:
            return LayerSize(dense=parameters, smallest=smallest, certain=certain, parameters=parameters)
        fixed = fewest_bytes(d_in, d_out, self.codes) if self.codes.fixed else None
        codes = [] if fixed is None else [fixed]
        least = list(codes) if self.codes.alone else [*codes, smallest * self.itemsize]
        if self.codes.factors and (factors := fewest_factor_bytes(d_in, d_out)) is not None:
            codes.append(factors)
        if self.codes.entropy_coded:
            least.append(fewest_coded_bytes(d_in, d_out))
            # A layer has no candidates of more.
            codes += [most for most in [most_coded_bytes(d_in, d_out)] if most < parameters]
        # How small zeros and factors can be depends on the layer, so that only codes are certain.
        return LayerSize(
            dense=dense,
            smallest=min([dense, *least, *codes]),
            certain=min([dense, *codes]),
            parameters=parameters,
        )

    def table(self, d_in: int, d_out: int) -> LayerSize:
        """Return the size of a token embedding or head that may be quantized."""
        parameters = d_in * d_out
        dense = parameters * self.itemsize
        codes = fewest_bytes(d_in, d_out, self.codes.of_tables)
        fewest = dense if codes is None else min(dense, codes)
        return LayerSize(dense=dense, smallest=fewest, certain=fewest, parameters=parameters)

    def reach(self, sizes: Collection[LayerSize], *, other_bytes: int = 0) -> Reach:
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


def reach_of_headers(
    settings: Mapping[str, Any],
    weights: WeightSummary,
    config: CompressionConfig,
    *,
    dense_file_bytes: int | None = None,
) -> Reach:
    """Return how small a model can become whose layers are not profiled yet.

    In known families, the smallest size is that which a run finds once it has built the model. In others the token
    embedding and the head are not known, so that any matrix outside of the blocks may be one, and none is sure to be.

    Args:
        settings: the content of config.json.
        weights: summary of the safetensors headers.
        config: the compression.
        dense_file_bytes: bytes of the GGUF file of the dense model; None where none is written, or the tokenizer that
            it contains is not known.

    Raises:
        UnsupportedArchitectureError: no layer is left to compress.
        InvalidConfigError: matching the ignore patterns with names would take too much work.
    """
    itemsize = item_bytes(weights, config.dtype, "the model")
    found = find_layers(settings, weights, ignore=config.ignore, vision=config.includes_vision)
    layers = dict(layer for block in found.values() for layer in block)
    tables = HeaderTables(shapes={}, are_known=True)
    if config.decides_tables:
        tables = find_tables(settings, weights, ignore=config.ignore)
    only = config.target if isinstance(config.target, ByFormat) else None
    sizes = LayerSizes(
        itemsize=itemsize,
        counts_bytes=config.quantizes or only is not None,
        only=only,
        codes=config.code_choices,
    )
    known = [*_layer_sizes(sizes, layers), *_table_sizes(sizes, tables)]
    reach = replace(sizes.reach(known), remark=remark_on_rows(layers, config))
    if not isinstance(config.target, ByBytes):
        return replace(reach, other_bytes=max(0, weights.parameters * itemsize - reach.dense * reach.unit_bytes))
    stored = {**layers, **tables.shapes}
    numbers = sum(d_in * d_out for d_in, d_out in stored.values())
    dense = numbers * itemsize
    if dense_file_bytes is not None:
        return replace(reach, other_bytes=max(0, dense_file_bytes - dense) + _GGUF_ALIGNMENT * len(stored))
    others, mixed = _other_bytes(weights, config, numbers, itemsize)
    headers = header_bytes(_written(weights, stored, config), others + dense, config.max_shard_bytes)
    headers += config.reader.layer_bytes * len(stored)
    if "gguf" in config.export:
        vocabulary = find_number(settings, ("vocab_size",)) or 0
        vectors = sum(other.nbytes for other in weights.others if len(other.shape) < 2)
        room = headers + vectors + vocabulary * _TOKEN_BYTES + _GGUF_ALIGNMENT * weights.tensors
        return replace(reach, other_bytes=others, unsure_bytes=room)
    if not mixed and family_of(settings) in PREFIXES:
        return replace(reach, other_bytes=others + headers)
    # The names of parts that are split, such as the biases of experts, are not known.
    return replace(reach, other_bytes=others, unsure_bytes=2 * headers + mixed)


def remark_on_rows(layers: Mapping[str, Shape], config: CompressionConfig) -> str:
    """Return what to say about layers that fit no format of the engine; empty if all fit.

    Args:
        layers: `(d_in, d_out)` of each selected layer.
        config: the compression.
    """
    unfit: dict[int, dict[str, None]] = {}
    for name, shape in layers.items():
        if config.quantizes and fewest_bytes(*shape, config.code_choices) is None:
            unfit.setdefault(shape[0], {})[last_part(name)[:_MOST_CHARACTERS]] = None
    if not unfit:
        return ""
    lengths = sorted(unfit.items())[:_MOST_SHOWN]
    rows = " and of ".join(f"{length} inputs ({', '.join([*names][:_MOST_SHOWN])})" for length, names in lengths)
    form = "block type" if config.code_choices.blocks else "format"
    return (
        f". Rows of {rows} fit no {form} of {config.reader.title}, so that these layers stay as they are; the engine "
        "rocket compresses rows of any length"
    )


def _layer_sizes(sizes: LayerSizes, layers: Mapping[str, Shape]) -> Iterator[LayerSize]:
    for name, size in zip(layers, sizes.of_each(layers.values()), strict=True):
        yield replace(size, certain=size.dense) if last_part(name) in _ROUTERS else size


def _table_sizes(sizes: LayerSizes, tables: HeaderTables) -> Iterator[LayerSize]:
    for shape in tables.shapes.values():
        size = sizes.table(*shape)
        if not tables.is_family_known:
            size = replace(size, smallest=min(size.smallest, sizes.table(*reversed(shape)).smallest))
        yield size if tables.are_known else replace(size, certain=size.dense)


def _other_bytes(weights: WeightSummary, config: CompressionConfig, numbers: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of all tensors but those that may be stored otherwise, at least, and what they may be more.

    They are exact unless some matrices have another dtype than most.
    """
    if config.dtype != "auto":
        integers = sum(other.nbytes for other in weights.others if other.dtype not in FLOAT_DTYPES)
        return (weights.parameters - numbers) * itemsize + integers, 0
    sizes = [ITEM_BYTES[dtype] for dtype in weights.dtype_bytes if dtype in FLOAT_DTYPES]
    fewest = max(0, weights.decoded_bytes - numbers * max(sizes))
    return fewest, weights.decoded_bytes - numbers * min(sizes) - fewest


def _written(
    weights: WeightSummary, stored: Mapping[str, Shape], config: CompressionConfig
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield name and shape of every tensor of the artifact, each layer in the most parts that it may have."""
    parts = stored_parts(config.engine, codes_factors=config.codes_factors)
    split = {name for name, _ in weights.stacks}
    for other in weights.others:
        name = other.key.removesuffix(".weight")
        if name not in stored and name not in split:
            yield other.key, other.shape
    for name, shape in weights.matrices:
        if name not in stored:
            yield f"{name}.weight", shape
    for name, shape in stored.items():
        for part in parts:
            yield f"{name}.{part}", shape
