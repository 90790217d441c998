"""Writing safetensors from tensors that are produced one by one, so that a whole shard is never in memory."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from rocket_core.checkpoint.reader import DTYPES, SMALL_DTYPES, TensorEntry
from rocket_core.inspection.files.safetensors_headers import INDEX_NAME
from rocket_core.inspection.headers.header_size import ALIGNMENT, METADATA
from rocket_core.system.devices import bytes_on_host
from rocket_core.system.files import Opener, atomic_write

_DTYPE_NAMES = {dtype: name for name, dtype in (DTYPES | SMALL_DTYPES).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """A tensor to be written, with known size but not yet in memory.

    Attributes:
        key: its name.
        dtype: safetensors name of its dtype.
        shape: its shape.
        nbytes: bytes of the tensor.
        chunks: produces its bytes when it is written.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[bytes]]


def plan_tensor(key: str, dtype: torch.dtype, shape: Sequence[int], make: Callable[[], torch.Tensor]) -> TensorPlan:
    """Plan a tensor that `make` computes when it is written.

    Args:
        key: its name.
        dtype: its dtype.
        shape: its shape.
        make: returns the tensor; called once.
    """

    def chunks() -> Iterator[bytes]:
        tensor = make().detach().to(dtype).contiguous()
        assert tuple(tensor.shape) == tuple(shape), (key, tensor.shape, shape)
        yield from bytes_on_host(tensor.flatten().view(torch.uint8))

    nbytes = math.prod(shape) * dtype.itemsize
    return TensorPlan(key=key, dtype=_DTYPE_NAMES[dtype], shape=tuple(shape), nbytes=nbytes, chunks=chunks)


def plan_copy(entry: TensorEntry, *, key: str | None = None) -> TensorPlan:
    """Plan a byte-for-byte copy of a stored tensor, under its own name unless another is given."""
    return TensorPlan(
        key=key or entry.key, dtype=entry.dtype, shape=entry.shape, nbytes=entry.nbytes, chunks=entry.chunks
    )


def write_checkpoint(
    folder: Path,
    plans: Iterable[TensorPlan],
    *,
    max_shard_bytes: int,
    on_tensor: Callable[[str], None] = lambda _key: None,
    opener: Opener = atomic_write,
) -> int:
    """Write a model's tensors as one safetensors file, or as shards with an index.

    The files and their bytes depend only on the tensors.

    Args:
        folder: an existing, empty folder.
        plans: the tensors, in any order.
        max_shard_bytes: size at which a new file is started; a larger tensor gets its own file.
        on_tensor: called with each name before it is written.
        opener: opens each file; `compared` compares files that are written already.

    Returns:
        Size of all files written, excluding the index.
    """
    shards = _files(plans, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with opener(folder / name) as stream:
            write_safetensors(stream, shard, on_tensor=on_tensor)
        total += (folder / name).stat().st_size
        weight_map.update((plan.key, name) for plan in shard)
    if len(shards) > 1:
        size = sum(plan.nbytes for shard in shards for plan in shard)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        with opener(folder / INDEX_NAME) as stream:
            stream.write((json.dumps(index, indent=2) + "\n").encode())
    return total


def write_safetensors(
    stream: BinaryIO, plans: Sequence[TensorPlan], *, on_tensor: Callable[[str], None] = lambda _key: None
) -> None:
    """Write one safetensors file.

    Tensors are sorted by falling item size and then by name, as in the safetensors library: every tensor is then
    aligned to its item size without padding, which the format forbids.

    Args:
        stream: stream to write to.
        plans: the tensors.
        on_tensor: called with each name before it is written.
    """
    ordered = _ordered(plans)
    stream.write(_header(ordered))
    for plan in ordered:
        on_tensor(plan.key)
        written = 0
        for chunk in plan.chunks():
            written += stream.write(chunk)
        assert written == plan.nbytes, (plan.key, written, plan.nbytes)


def checkpoint_bytes(plans: Iterable[TensorPlan], max_shard_bytes: int) -> int:
    """Return the size of the files that `write_checkpoint` writes, excluding the index."""
    return sum(
        len(_header(_ordered(shard))) + sum(plan.nbytes for plan in shard) for shard in _files(plans, max_shard_bytes)
    )


def _ordered(plans: Iterable[TensorPlan]) -> list[TensorPlan]:
    return sorted(plans, key=lambda plan: (-_itemsize(plan), plan.key))


def _header(ordered: Sequence[TensorPlan]) -> bytes:
    """Return the beginning of a file, up to its tensors."""
    header: dict[str, object] = {"__metadata__": dict(METADATA)}
    position = 0
    for plan in ordered:
        header[plan.key] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [position, position + plan.nbytes],
        }
        position += plan.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def _itemsize(plan: TensorPlan) -> int:
    # Dtypes that torch does not compute with are copied as well; they are the small ones.
    return DTYPES[plan.dtype].itemsize if plan.dtype in DTYPES else 1


def _files(plans: Iterable[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
    """Return the tensors of each file."""
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in sorted(plans, key=lambda plan: (_natural(plan.key), plan.key)):
        if shards[-1] and size + plan.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.nbytes
    return shards


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts `layers.10` after `layers.9`, so that a shard holds neighbouring blocks."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", key) if part]
