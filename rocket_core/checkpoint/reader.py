"""Reading safetensors: tensors found by `rocket_core.inspection.files.safetensors_headers`, with torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.experts import ExpertPart, FusedParameter
from rocket_core.inspection.files import safetensors_headers
from rocket_core.inspection.files.safetensors_headers import TensorHeader
from rocket_core.inspection.headers.weight_summary import WeightSummary, summarize

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
class TensorEntry(TensorHeader):
    """The location of a tensor.

    Attributes:
        file: the file that holds it.
    """

    file: Path

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes as stored, a megabyte at a time."""
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
        """Return the tensor, on the CPU.

        Raises:
            CheckpointFormatError: the dtype is not one that plain torch arithmetic supports.
        """
        if self.dtype not in DTYPES:
            raise CheckpointFormatError(f"tensor {self.key!r} in {self.file} has unsupported dtype {self.dtype}")
        data = bytearray().join(self.chunks())
        if not data:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEntry(TensorEntry):
    """A tensor of one expert within a stored tensor of all experts of a block; its bytes need not be adjacent.

    Attributes:
        expert: location of everything that the stored tensor holds of this expert.
        part: the part of that.
    """

    expert: TensorEntry
    part: ExpertPart

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numbers * DTYPES[self.dtype].itemsize

    @property
    def numbers(self) -> int:
        """Count of numbers in the tensor."""
        return math.prod(self.shape)

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, all at once."""
        yield self.read().flatten().view(torch.uint8).numpy().tobytes()

    def read(self) -> torch.Tensor:
        """Return the tensor, on the CPU.

        Raises:
            CheckpointFormatError: the dtype is not one that plain torch arithmetic supports.
        """
        # A view of half of the outputs would hold those of the other half as well.
        return self.part.within(self.expert.read()).clone(memory_format=torch.contiguous_format)


def split_experts(entry: TensorEntry, fused: FusedParameter) -> dict[str, PartEntry]:
    """Return the tensors of single experts within a stored tensor of all experts of a block, by name."""
    size = entry.nbytes // entry.shape[0]
    meta = torch.empty(entry.shape, device="meta")
    found: dict[str, PartEntry] = {}
    for name, part in fused.parts.items():
        start = entry.start + part.expert * size
        where: dict[str, Any] = {"dtype": entry.dtype, "start": start, "stop": start + size, "file": entry.file}
        expert = TensorEntry(key=name, shape=entry.shape[1:], **where)
        found[name] = PartEntry(key=name, shape=tuple(part.of(meta).shape), expert=expert, part=part, **where)
    return found


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The safetensors of one model.

    Attributes:
        folder: folder of the files.
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

    @cached_property
    def weights(self) -> WeightSummary:
        """Dtypes and shapes of the weight matrices."""
        return summarize(self.entries.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find the safetensors of a folder and check every header against its file.

    Args:
        folder: checkpoint folder.

    Raises:
        CheckpointFormatError: the folder contains no safetensors.
        CorruptCheckpointError: a file is missing or truncated, or its header is not valid.
    """
    files = safetensors_headers.local_weight_files(folder, str(folder))
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
    """Return the tensors of one safetensors file, in the order of their bytes.

    Raises:
        CorruptCheckpointError: the header cannot be read or does not describe the file.
    """
    return [
        TensorEntry(
            key=header.key, dtype=header.dtype, shape=header.shape, start=header.start, stop=header.stop, file=file
        )
        for header in safetensors_headers.read_header(file, str(file))
    ]
