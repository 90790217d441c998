"""Reading safetensors: headers are parsed and checked before anything trusts them."""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 2**20

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
        key: its name.
        dtype: safetensors name of its dtype.
        shape: its shape.
        file: the file that holds it.
        start: offset of its first byte in the file.
        stop: offset behind its last byte.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes as stored, a megabyte at a time."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            left = self.nbytes
            while left:
                chunk = stream.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise CorruptCheckpointError(f"{self.file} ends inside tensor {self.key!r}; fetch the file again")
                left -= len(chunk)
                yield chunk

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU.

        Raises:
            CheckpointFormatError: a dtype that plain torch arithmetic does not have.
        """
        if self.dtype not in DTYPES:
            raise CheckpointFormatError(f"tensor {self.key!r} in {self.file} has unsupported dtype {self.dtype}")
        data = bytearray().join(self.chunks())
        if not data:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The safetensors of one model.

    Attributes:
        folder: where they lie.
        files: the files, sorted by name.
        entries: every tensor by name.
    """

    folder: Path
    files: tuple[Path, ...]
    entries: dict[str, TensorEntry]

    @cached_property
    def stored_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Finds the safetensors of a folder and checks every header against its file.

    Args:
        folder: checkpoint folder.

    Raises:
        CheckpointFormatError: there are no safetensors.
        CorruptCheckpointError: a file is missing, truncated, or its header makes no sense.
    """
    files = _files(folder)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.key in entries:
                raise CorruptCheckpointError(
                    f"tensor {entry.key!r} is in {entries[entry.key].file.name} and again in {file.name} of {folder}; "
                    "remove the files of one of the two checkpoints"
                )
            entries[entry.key] = entry
    return Checkpoint(folder=folder, files=files, entries=entries)


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        CorruptCheckpointError: the header cannot be read or does not describe the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CorruptCheckpointError(f"{file} is no safetensors file or is cut off; fetch it again")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [_entry(file, key, fields, 8 + length) for key, fields in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file} has a damaged header ({error}); fetch it again") from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = 8 + length
    for entry in entries:
        itemsize = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        if entry.start != position or (itemsize and entry.nbytes != math.prod(entry.shape) * itemsize):
            raise CorruptCheckpointError(f"{file}: tensor {entry.key!r} has offsets that do not fit; fetch it again")
        position = entry.stop
    if position != size:
        raise CorruptCheckpointError(
            f"{file} has {size} bytes, but its header describes {position}: it is cut off or damaged; fetch it again"
        )
    return entries


def _entry(file: Path, key: str, fields: dict[str, object], base: int) -> TensorEntry:
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"tensor {key!r} lacks shape or offsets")
    start, stop = (int(offset) for offset in offsets)
    return TensorEntry(
        key=key,
        dtype=str(fields["dtype"]),
        shape=tuple(int(size) for size in shape),
        file=file,
        start=base + start,
        stop=base + stop,
    )


def _files(folder: Path) -> tuple[Path, ...]:
    # The choice that transformers makes: other weights beside these belong to other tools.
    single, index = folder / "model.safetensors", folder / INDEX_NAME
    if single.is_file():
        return (single,)
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{index} is damaged ({error!r}); fetch it again") from error
        if any(Path(name).name != name for name in names):
            raise CorruptCheckpointError(f"{index} names files outside its folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CorruptCheckpointError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; fetch them again"
            )
        return tuple(folder / name for name in names)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        found = f"only {others[0]}, a pickle, which is never loaded" if others else "none"
        raise CheckpointFormatError(
            f"{folder} should hold safetensors, but there is {found}; convert the model with "
            "save_pretrained(..., safe_serialization=True)"
        )
    return files
