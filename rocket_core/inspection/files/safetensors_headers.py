"""Safetensors headers: the files of a checkpoint, and the tensors that they declare. Loads no torch.

A header is checked against its file before it is trusted. Callers pass the name of a file that may appear in messages:
a path on the command line, less in a service with untrusted clients.
"""

import math
import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.inspection.files.strict_json import parse_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
PREFIX_BYTES = 8

# The Hub's limit; a model of a hundred thousand tensors in one file needs less than half of it.
MAX_HEADER_BYTES = 25_000_000
MAX_TENSORS = 250_000
# Video models convolve over five dimensions; no known model stores more than six.
MAX_DIMENSIONS = 8
# The longest names of real tensors have about 120 characters.
MAX_NAME_CHARACTERS = 512
# Free text written by training programs.
MAX_METADATA_CHARACTERS = 2**20
MAX_FILES = 4096

# Limit for tensors without numbers, whose other dimensions nothing else bounds.
_MAX_DIMENSION = 2**40
_MAX_FILE_NAME = 255

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Plain floating-point dtypes: weights must be stored in one of them to be compressed."""

# In bits, because some kinds of number are smaller than a byte.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """A tensor as described in a header.

    Attributes:
        key: its name.
        dtype: safetensors name of its dtype.
        shape: its shape.
        start: offset of its first byte in the file.
        stop: offset after its last byte.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; of one that is decoded, those of what that makes."""
        return self.numbers * _BITS[self.dtype] // 8

    @property
    def file_bytes(self) -> int:
        """Bytes that the tensor takes in the files, which are fewer if it is stored in few bits."""
        return self.stop - self.start

    @property
    def numbers(self) -> int:
        """Count of numbers in the tensor."""
        return math.prod(self.shape)


def weight_files(names: Collection[str], read_index: Callable[[], bytes], folder: str) -> tuple[str, ...]:
    """Return the files that make up a checkpoint, by the same rules as transformers; others belong to other tools.

    Args:
        names: files of the folder.
        read_index: returns the content of `INDEX_NAME`; called only if needed.
        folder: name of the folder in messages.

    Raises:
        CheckpointFormatError: the folder contains no safetensors.
        CorruptCheckpointError: the index is damaged, or a file that it names is missing.
    """
    if SINGLE_NAME in names:
        return (SINGLE_NAME,)
    if INDEX_NAME in names:
        files = _indexed_files(read_index(), f"{folder}/{INDEX_NAME}")
        missing = [name for name in files if name not in names]
        if missing:
            raise CorruptCheckpointError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, first {missing[0]}; fetch them again"
            )
        return files
    files = tuple(sorted(name for name in names if name.endswith(SUFFIX)))
    if not files:
        others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        others_text = f"only {others[0]}, a pickle, which is never loaded" if others else "none"
        raise CheckpointFormatError(
            f"{folder} should hold safetensors, but there is {others_text}; convert the model with "
            "save_pretrained(..., safe_serialization=True)"
        )
    return files


def local_weight_files(folder: Path, name: str) -> tuple[Path, ...]:
    """Return the files that make up the checkpoint in a folder.

    Args:
        folder: the checkpoint.
        name: name of the folder in messages.

    Raises:
        CheckpointFormatError: the folder contains no safetensors.
        CorruptCheckpointError: the index is damaged, or a file that it names is missing.
    """
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return tuple(folder / file for file in weight_files(names, (folder / INDEX_NAME).read_bytes, name))


def read_header(file: Path, name: str) -> list[TensorHeader]:
    """Return the tensors of one safetensors file, in the order of their bytes.

    Args:
        file: the file.
        name: name of the file in messages.

    Raises:
        CheckpointFormatError: a tensor has a dtype that this library does not know.
        CorruptCheckpointError: the header cannot be read or does not describe the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = header_length(stream.read(PREFIX_BYTES), size, name)
        return parse_header(stream.read(length), size, name)


def header_length(prefix: bytes, size: int, name: str) -> int:
    """Return the length of the header that follows a file's first 8 bytes.

    Args:
        prefix: those 8 bytes.
        size: size of the whole file, in bytes.
        name: name of the file in messages.

    Raises:
        CorruptCheckpointError: a header cannot have that length.
    """
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == PREFIX_BYTES else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - PREFIX_BYTES):
        raise CorruptCheckpointError(f"{name} is not a safetensors file or is truncated; fetch it again")
    return length


def parse_header(raw: bytes, size: int, name: str) -> list[TensorHeader]:
    """Return the tensors that a header describes, in the order of their bytes, which must fill the file without a gap.

    Args:
        raw: the header.
        size: size of the whole file, in bytes.
        name: name of the file in messages.

    Raises:
        CheckpointFormatError: a tensor has a dtype that this library does not know.
        CorruptCheckpointError: the header cannot be read or does not describe such a file.
    """
    base = PREFIX_BYTES + len(raw)
    try:
        fields = parse_object(raw, parse_float=_reject_fraction)
        _check_metadata(fields.pop("__metadata__", None))
        if len(fields) > MAX_TENSORS:
            raise ValueError(f"{len(fields)} tensors, more than {MAX_TENSORS}")
        headers = [_tensor(key, value, base, size, name) for key, value in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{name} has a damaged header ({_reason(error)}); fetch it again") from error
    headers.sort(key=lambda header: (header.start, header.stop))
    position = base
    for header in headers:
        if header.start != position:
            raise CorruptCheckpointError(f"{name}: tensor {header.key!r} has offsets that do not fit; fetch it again")
        position = header.stop
    if position != size:
        raise CorruptCheckpointError(
            f"{name} has {size} bytes, but its header describes {position}: it is cut off or damaged; fetch it again"
        )
    return headers


def _indexed_files(raw: bytes, name: str) -> tuple[str, ...]:
    try:
        named = set(parse_object(raw)["weight_map"].values())
        if len(named) > MAX_FILES:
            raise ValueError(f"{len(named)} files, more than {MAX_FILES}")
        outside = any(len(file) > _MAX_FILE_NAME or Path(file).name != file for file in named)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{name} is damaged ({_reason(error)}); fetch it again") from error
    if outside or not named:
        what = "files outside its folder" if outside else "no files"
        raise CorruptCheckpointError(f"{name} names {what}; fetch it again")
    return tuple(sorted(named))


def _tensor(key: str, fields: dict[str, Any], base: int, size: int, name: str) -> TensorHeader:
    if len(key) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a tensor's name has {len(key)} characters, more than {MAX_NAME_CHARACTERS}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"tensor {key!r} has no dtype")
    if not _is_list_of_sizes(shape) or not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {key!r} lacks shape or offsets")
    if dtype not in _BITS:
        raise CheckpointFormatError(
            f"{name}: tensor {key!r} has dtype {dtype}, which is not supported; convert the model to F32, F16 or BF16"
        )
    header = TensorHeader(key=key, dtype=dtype, shape=tuple(shape), start=base + offsets[0], stop=base + offsets[1])
    if _count_numbers(header, size) * _BITS[dtype] != 8 * header.file_bytes:
        raise ValueError(f"tensor {key!r} has offsets that do not fit its shape")
    return header


def _count_numbers(header: TensorHeader, size: int) -> int:
    """Return the product of a shape's dimensions; stops early once it exceeds the number of bits in the file."""
    if len(header.shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {header.key!r} has {len(header.shape)} dimensions, more than {MAX_DIMENSIONS}")
    if 0 in header.shape:
        if max(header.shape) > _MAX_DIMENSION:
            raise ValueError(f"tensor {header.key!r} has a dimension above {_MAX_DIMENSION}")
        return 0
    count = 1
    for dimension in header.shape:
        count *= dimension
        if count > 8 * size:
            raise ValueError(f"tensor {header.key!r} is larger than its file")
    return count


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds something other than text")
    if sum(len(key) + len(value) for key, value in metadata.items()) > MAX_METADATA_CHARACTERS:
        raise ValueError(f"__metadata__ has more than {MAX_METADATA_CHARACTERS} characters")


def _is_list_of_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _reject_fraction(_text: str) -> float:
    raise ValueError("a number that is not an integer")


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error) if isinstance(error, ValueError) else "not an object of the expected form"
