"""Bytes of an artifact before it is written, so that a target size can be met to the byte.

The size is that of the `rocket` artifact, or for another engine of the one that it reads.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from rocket_core.allocation import Allocation
from rocket_core.allocation.predictor import Predictor
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.checkpoint import TensorPlan, checkpoint_bytes, plan_tensor
from rocket_core.exports import block_tensors, compressed_tensors, mlx, olive
from rocket_core.exports.gguf_file import ALIGNMENT
from rocket_core.exports.gguf_model import GgufPlan
from rocket_core.exports.gguf_writer import gguf_storage
from rocket_core.inspection.headers.header_size import header_bytes, stored_parts
from rocket_core.layers import mask_shape
from rocket_core.layers.code_tensors import code_shapes
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.stages.export import plan_untouched
from rocket_core.sizes.block_types import BlockType
from rocket_core.sizes.code_format import coded_format
from rocket_core.sizes.target import ByBytes, ByLoss

# Shapes of the tensors of layers of codes, by the export.
_PACKED = {"compressed-tensors": compressed_tensors.part_shapes, "olive": olive.part_shapes}
# Each round uses the bytes that the previous one left; names and offsets hardly change after the second.
_ROUNDS = 6
# Digits that a number in the header may gain.
_DIGITS = 3


def bytes_beside(run: Run, layers: Collection[str]) -> int:
    """Return an upper bound on the artifact's bytes other than the weights of the given layers.

    Args:
        run: the run.
        layers: names of compressible layers.
    """
    if run.gguf is not None:
        dense = sum(run.stored_bytes(name) for name in layers)
        return _gguf_bytes(run, run.gguf, {}) - dense + ALIGNMENT * len(layers)
    compressible = {f"{run.disk_name(name)}.weight" for name in layers}
    tensors: list[tuple[str, tuple[int, ...]]] = []
    # No part has more dimensions, or is longer, than the weight's own shape. Codes have fewer parts.
    parts = stored_parts(run.config.engine, codes_factors=run.config.codes_factors)
    others = run.config.reader.layer_bytes * len(layers)
    for key, entry in run.artifact_entries(layers).items():
        if key in compressible:
            tensors += ((key.removesuffix("weight") + part, entry.shape) for part in parts)
        else:
            tensors.append((key, entry.shape))
            others += plan_untouched(run, entry).nbytes
    total = others + sum(run.stored_bytes(name) for name in layers)
    return others + header_bytes(tensors, total, run.config.max_shard_bytes)


def artifact_bytes(run: Run, selected: Iterable[tuple[LayerProfile, Candidate]]) -> int:
    """Return the bytes of all safetensors of the artifact, names and shapes included.

    Args:
        run: the run.
        selected: every profiled layer with its candidate.
    """
    stored = {
        f"{run.disk_name(layer.name)}.weight": (layer, candidate)
        for layer, candidate in selected
        if candidate.kind != "dense"
    }
    if run.gguf is not None:
        types = {
            key: candidate.block_type for key, (_, candidate) in stored.items() if candidate.block_type is not None
        }
        return _gguf_bytes(run, run.gguf, types)
    plans: list[TensorPlan] = []
    for key, entry in run.artifact_entries(layer.name for layer, _ in stored.values()).items():
        chosen = stored.get(key)
        plans += [plan_untouched(run, entry)] if chosen is None else _parts(run, key, *chosen)
    return checkpoint_bytes(plans, run.config.max_shard_bytes)


def fill_size(run: Run, size: int, predictor: Predictor) -> Allocation:
    """Return the best allocation whose artifact takes at most the given number of bytes.

    A first allocation assumes the longest names and shapes. What it leaves of the size is given to the next.

    Args:
        run: the run.
        size: upper bound on the bytes of all safetensors.
        predictor: predictor of the profiled model.

    Raises:
        InfeasibleBudgetError: no choice of candidates is small enough.
    """
    best = predictor.within_bytes(size)
    allowed, left = size, size - artifact_bytes(run, predictor.chosen(best))
    for _ in range(_ROUNDS):
        if left <= 0:
            break
        tried = predictor.within_bytes(allowed + left)
        after = size - artifact_bytes(run, predictor.chosen(tried))
        if after < 0:
            # Names or offsets are longer than before: leave room for them, and rule out this allocation.
            left += after - (tried.budget - tried.kept)
            continue
        allowed, left, best = allowed + left, after, tried
    return best


def unallocated_bytes(
    run: Run, allocation: Allocation, selected: Sequence[tuple[LayerProfile, Candidate]]
) -> int | None:
    """Return the bytes of the budget that an allocation leaves for entropy-coded layers; None without a budget.

    Args:
        run: the run.
        allocation: the allocation.
        selected: every profiled layer with its candidate.
    """
    match run.config.target:
        case ByBytes(target_bytes=size):
            # Longer streams may have more digits in the header, in a shape and two offsets of each.
            coded = sum(candidate.kind == "entropy_coded" for _, candidate in selected)
            return size - artifact_bytes(run, selected) - _DIGITS * 2 * coded
        case ByLoss():
            # So that a layer has the same result in every round in which it has the same candidate.
            return None
        case _:
            return allocation.budget - allocation.kept


def _gguf_bytes(run: Run, plan: GgufPlan, types: Mapping[str, BlockType]) -> int:
    """Return the bytes of a GGUF file, given the block types of tensors that are not dense."""
    dense = gguf_storage(run.dtype)
    entries = run.split_entries().items()
    return plan.file_bytes((key, entry.shape, types.get(key, dense)) for key, entry in entries)


def _parts(run: Run, key: str, layer: LayerProfile, candidate: Candidate) -> Iterator[TensorPlan]:
    """Yield the tensors of a stored layer, without their contents."""
    for part, (dtype, shape) in _tensors(run, layer, candidate).items():
        yield plan_tensor(key.removesuffix("weight") + part, dtype, shape, lambda: torch.empty(0))


def _tensors(run: Run, layer: LayerProfile, candidate: Candidate) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor, by the part of its name after `L.`."""
    shape, block_type = (layer.d_in, layer.d_out), candidate.block_type
    if block_type is not None:
        return (
            block_tensors.part_shapes(shape, block_type, run.dtype)
            if run.config.reader.exports[0] == "compressed-tensors"
            else mlx.part_shapes(shape, block_type)
        )
    packed = _PACKED.get(run.config.reader.exports[0])
    if packed is not None:
        return packed(shape, candidate.code_format, run.dtype)
    if candidate.kind == "quantized":
        shapes = code_shapes((layer.d_in, layer.d_out), candidate.code_format)
        return {part: (torch.uint8, shape) for part, shape in shapes.items()}
    if candidate.kind == "entropy_coded":
        coded = coded_format(layer.d_in)
        scale_bytes = coded.scale_bytes(layer.d_in, layer.d_out)
        shapes = code_shapes((layer.d_in, layer.d_out), coded, candidate.stored_bytes - scale_bytes)
        return {part: (torch.uint8, shape) for part, shape in shapes.items()}
    if candidate.bits is not None:
        assert candidate.rank is not None
        values = code_shapes((candidate.rank * layer.d_out, 1), candidate.code_format)
        atoms = code_shapes((candidate.rank, layer.d_in), candidate.code_format)
        shapes = values | {part.replace("weight", "weight_u"): shape for part, shape in atoms.items()}
        return {part: (torch.uint8, shape) for part, shape in shapes.items()}
    assert candidate.nnz is not None
    rows = layer.d_in if candidate.rank is None else candidate.rank
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"weight": (run.dtype, (candidate.nnz,))}
    if candidate.rank is None or candidate.nnz < rows * layer.d_out:
        tensors["weight_mask"] = (torch.uint8, mask_shape(rows, layer.d_out))
    if candidate.rank is not None and candidate.dictionary in (None, layer.name):
        tensors["weight_u"] = (run.dtype, (candidate.rank, layer.d_in))
    return tensors
