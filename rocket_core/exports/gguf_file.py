"""GGUF files: metadata and tensors, written one tensor at a time, of a size that is known beforehand.

The bytes depend only on the metadata and the tensors. The writer of the `gguf` package needs every tensor as an array
and does not tell the size of the file before it is written.

References:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Literal

from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockType

Storage = BlockType | Literal["F32", "F16", "BF16"]
"""How the numbers of a tensor are stored."""

FLOAT_BYTES: dict[Storage, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number that is stored as it is."""

# The format's numbers for storage types.
_STORAGE_IDS: dict[Storage, int] = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
}
# The format's numbers for types of metadata, and their encodings.
_SCALARS: dict[str, tuple[int, str]] = {
    "uint32": (4, "<I"),
    "int32": (5, "<i"),
    "float32": (6, "<f"),
    "bool": (7, "<?"),
}
_STRING, _ARRAY = 8, 9
_MAGIC, _VERSION = b"GGUF", 3
ALIGNMENT = 32
"""Tensors start at multiples of this, counted from the first."""

Scalar = int | float | bool | str


@dataclass(frozen=True)
class GgufValue:
    """A value of the metadata.

    Attributes:
        kind: its type, or that of its elements.
        content: one value, or a sequence of them.
    """

    kind: Literal["uint32", "int32", "float32", "bool", "string"]
    content: Scalar | Sequence[Scalar]

    @cached_property
    def encoded(self) -> bytes:
        """Type and content as files hold them, computed once: a vocabulary takes a third of a second."""
        kind = _STRING if self.kind == "string" else _SCALARS[self.kind][0]
        if isinstance(self.content, Sequence) and not isinstance(self.content, str):
            elements = b"".join(_scalar(self.kind, element) for element in self.content)
            return struct.pack("<IIQ", _ARRAY, kind, len(self.content)) + elements
        return struct.pack("<I", kind) + _scalar(self.kind, self.content)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        name: its name in the file.
        shape: its shape, in torch's order: rows are last.
        storage: how its numbers are stored.
        chunks: produces its bytes when it is written.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    chunks: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return storage_bytes(self.shape, self.storage)


def storage_bytes(shape: Sequence[int], storage: Storage) -> int:
    """Return the bytes of a tensor.

    Args:
        shape: its shape.
        storage: how its numbers are stored; for block types rows must be whole blocks.
    """
    if storage in FLOAT_BYTES:
        return math.prod(shape) * FLOAT_BYTES[storage]
    return math.prod(shape[:-1]) * BLOCK_FORMATS[storage].row_bytes(shape[-1])  # type: ignore[index]


def gguf_bytes(metadata: Mapping[str, GgufValue], tensors: Iterable[tuple[str, Sequence[int], Storage]]) -> int:
    """Return the size of a file.

    Args:
        metadata: see `write_gguf`.
        tensors: name, shape and storage of each tensor.
    """
    planned = [
        GgufTensor(name=name, shape=tuple(shape), storage=storage, chunks=tuple) for name, shape, storage in tensors
    ]
    return len(_header(metadata, planned)) + sum(_padded(tensor.nbytes) for tensor in planned)


def write_gguf(stream: BinaryIO, metadata: Mapping[str, GgufValue], tensors: Sequence[GgufTensor]) -> int:
    """Write a file, and return its size.

    Args:
        stream: stream to write to, at its beginning.
        metadata: values by key, in the order in which they are written.
        tensors: the tensors, in the order in which they are written.
    """
    total = stream.write(_header(metadata, tensors))
    for tensor in tensors:
        written = 0
        for chunk in tensor.chunks():
            written += stream.write(chunk)
        assert written == tensor.nbytes, (tensor.name, written, tensor.nbytes)
        total += written + stream.write(bytes(_padded(written) - written))
    return total


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _header(metadata: Mapping[str, GgufValue], tensors: Sequence[GgufTensor]) -> bytes:
    """Return the beginning of a file, up to its tensors."""
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), value.encoded]
    position = 0
    for tensor in tensors:
        shape = tuple(reversed(tensor.shape))
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        parts.append(struct.pack("<IQ", _STORAGE_IDS[tensor.storage], position))
        position += _padded(tensor.nbytes)
    header = b"".join(parts)
    return header + bytes(_padded(len(header)) - len(header))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _scalar(kind: str, content: Scalar) -> bytes:
    if kind == "string":
        assert isinstance(content, str)
        return _string(content)
    return struct.pack(_SCALARS[kind][1], content)
