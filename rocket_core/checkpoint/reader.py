"""Reading safetensors: tensors found by `rocket_core.inspection.files.safetensors_headers`, with torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from rocket_core.checkpoint.decoders import DECODERS
from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.experts import ExpertPart, FusedParameter
from rocket_core.inspection.files import safetensors_headers
from rocket_core.inspection.files.safetensors_headers import TensorHeader
from rocket_core.inspection.headers.coded_tensors import CodedFormat, CodedTensor
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
    "U32": torch.uint32,
    "BOOL": torch.bool,
}

# Dtypes of codes and their scales, which plain torch arithmetic does not support.
SMALL_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
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
                    raise self._ends()
                left -= len(chunk)
                yield chunk

    def read(self) -> torch.Tensor:
        """Return the tensor, on the CPU.

        Raises:
            CheckpointFormatError: the dtype is not one that plain torch arithmetic supports.
        """
        if self.dtype not in DTYPES:
            raise CheckpointFormatError(f"tensor {self.key!r} in {self.file} has unsupported dtype {self.dtype}")
        return self.read_as(DTYPES[self.dtype])

    def read_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, given the dtype that its own is in torch, on the CPU."""
        found = torch.empty(self.shape, dtype=dtype)
        self._read_into(found.flatten().view(torch.uint8).numpy().data)
        return found

    def _read_into(self, data: memoryview) -> None:
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.start)
            while data:
                count = stream.readinto(data)
                if not count:
                    raise self._ends()
                data = data[count:]

    def _ends(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.file} ends inside tensor {self.key!r}; fetch the file again")

    def row(self, index: int, key: str) -> "TensorEntry":
        """Return the location of a part of the first axis, under another name."""
        size = self.nbytes // self.shape[0]
        start = self.start + index * size
        return TensorEntry(
            key=key, dtype=self.dtype, shape=self.shape[1:], start=start, stop=start + size, file=self.file
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedEntry(TensorEntry):
    """A weight that is stored in few bits and decoded when it is read.

    Attributes:
        coded: scheme and options.
        parts: the locations of its tensors, by the endings of their names.
    """

    coded: CodedTensor
    parts: Mapping[str, TensorEntry]

    @property
    def file_bytes(self) -> int:
        """Bytes of all of its tensors in the files."""
        return sum(part.nbytes for part in self.parts.values())

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the decoded weight, those of one expert at a time where it holds several."""
        if len(self.shape) > 2:
            for index in range(self.shape[0]):
                yield from self.row(index, self.key).chunks()
        else:
            yield self._decoded().flatten().view(torch.uint8).numpy().tobytes()

    def read(self) -> torch.Tensor:
        """Return the decoded weight, on the CPU.

        Raises:
            CorruptCheckpointError: its tensors do not fit together.
        """
        if len(self.shape) <= 2:
            return self._decoded()
        found = torch.empty(self.shape, dtype=DTYPES[self.dtype])
        for index, expert in enumerate(found):
            expert.copy_(self.row(index, self.key).read())
        return found

    def row(self, index: int, key: str) -> TensorEntry:
        """Return the weight of one expert, under another name."""
        parts = {
            ending: part if part.shape[:1] != self.shape[:1] else part.row(index, part.key)
            for ending, part in self.parts.items()
        }
        return replace(self, key=key, shape=self.shape[1:], parts=parts)

    def _decoded(self) -> torch.Tensor:
        dtypes = DTYPES | SMALL_DTYPES
        tensors = {ending: part.read_as(dtypes[part.dtype]) for ending, part in self.parts.items()}
        try:
            weight = DECODERS[self.coded.scheme.name](tensors, self.coded.options)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self._fault(str(error)) from error
        if tuple(weight.shape) != self.shape:
            raise self._fault(f"{tuple(weight.shape)} instead of {self.shape}")
        return weight.to(DTYPES[self.dtype]).contiguous()

    def _fault(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.file}: the tensors of {self.key!r} cannot be decoded ({reason}); fetch the checkpoint again"
        )


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
    def file_bytes(self) -> int:
        """Bytes of the tensor's share in the files."""
        return self.numbers * self.expert.file_bytes // self.expert.numbers

    def chunks(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, all at once."""
        yield self.read().flatten().view(torch.uint8).numpy().tobytes()

    def read(self) -> torch.Tensor:
        """Return the tensor, on the CPU.

        Raises:
            CheckpointFormatError: the dtype is not one that plain torch arithmetic supports.
        """
        # A view of half of the outputs would hold those of the other half as well.
        return self.part.stored.within(self.expert.read()).clone(memory_format=torch.contiguous_format)


def split_experts(entry: TensorEntry, fused: FusedParameter) -> dict[str, PartEntry]:
    """Return the tensors of single experts within a stored tensor of all experts of a block, by name."""
    entry = replace(entry, shape=fused.by_expert)
    meta = torch.empty(entry.shape, device="meta")
    found: dict[str, PartEntry] = {}
    for name, part in fused.parts.items():
        expert = entry.row(part.expert, name)
        found[name] = PartEntry(
            key=name,
            dtype=expert.dtype,
            shape=tuple(part.of(meta).shape),
            start=expert.start,
            stop=expert.stop,
            file=expert.file,
            expert=expert,
            part=part,
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The safetensors of one model.

    Attributes:
        folder: folder of the files.
        files: the files, sorted by name.
        entries: every tensor by name; those of weights in few bits as one that is decoded.
        coded: how weights in few bits are stored; None for plain weights.
        left_out: tensors next to weights in few bits that neither decoding nor the model reads.
    """

    folder: Path
    files: tuple[Path, ...]
    entries: dict[str, TensorEntry]
    coded: CodedFormat | None = None
    left_out: tuple[TensorEntry, ...] = ()

    @cached_property
    def stored_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def decoded_bytes(self) -> int:
        """Size of all files if weights in few bits were decoded."""
        return self.stored_bytes + self.weights.decoded_bytes - self.weights.stored_bytes

    @cached_property
    def coded_bits(self) -> float | None:
        """Average bits of a weight in few bits, scales included; None for plain weights."""
        coded = [entry for entry in self.entries.values() if isinstance(entry, DecodedEntry)]
        numbers = sum(entry.numbers for entry in coded)
        return 8 * sum(entry.file_bytes for entry in coded) / numbers if numbers else None

    @cached_property
    def weights(self) -> WeightSummary:
        """Dtypes and shapes of the weight matrices."""
        return summarize(self.entries.values())


def open_checkpoint(folder: Path, coded: CodedFormat | None = None) -> Checkpoint:
    """Find the safetensors of a folder and check every header against its file.

    Args:
        folder: checkpoint folder.
        coded: how weights in few bits are stored, which are decoded; None leaves all tensors as they are.

    Raises:
        AlreadyQuantizedError: no weight is coded like that.
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
    left_out: tuple[TensorEntry, ...] = ()
    if coded is not None:
        decoded = {header.key: _entry(header) for header in coded.decoded(entries.values(), str(folder))}
        parts = [entry.parts.values() if isinstance(entry, DecodedEntry) else (entry,) for entry in decoded.values()]
        read = {part.key for entry in parts for part in entry}
        left_out = tuple(entry for key, entry in entries.items() if key not in read)
        entries = decoded
    return Checkpoint(folder=folder, files=files, entries=entries, coded=coded, left_out=left_out)


def _entry(header: TensorHeader) -> TensorEntry:
    """Return the entry of a tensor, given its own or the description of a coded one."""
    if isinstance(header, TensorEntry):
        return header
    assert isinstance(header, CodedTensor)
    parts = {ending: part for ending, part in header.parts.items() if isinstance(part, TensorEntry)}
    return DecodedEntry(
        key=header.key,
        dtype=header.dtype,
        shape=header.shape,
        start=header.start,
        stop=header.stop,
        file=parts[header.scheme.codes].file,
        coded=header,
        parts=parts,
    )


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
