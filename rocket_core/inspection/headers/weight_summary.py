"""Summary of the weights that the headers of a checkpoint declare. Loads no torch."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rocket_core.errors import AlreadyQuantizedError, CheckpointFormatError
from rocket_core.inspection.files.safetensors_headers import FLOAT_DTYPES, MAX_TENSORS, TensorHeader
from rocket_core.inspection.headers.coded_tensors import CodedFormat
from rocket_core.inspection.headers.expert_stacks import Stack, possible_shapes, stack_of

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the name of its dtype in files and in settings."""

_WEIGHT = ".weight"
# A list of modules numbers its members, and every part of a repeated block has such a number in its name.
_IN_A_BLOCK = re.compile(r"(?:^|\.)\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSummary:
    """Summary of the weight matrices in the headers of a checkpoint.

    Attributes:
        dtype_bytes: bytes of the tensors of two and more dimensions, by dtype.
        block_shapes: number of matrices inside numbered blocks, by shape as stored: includes every compressible layer,
            and others, among them those that a tensor of all experts may consist of.
        matrices: names and shapes, as stored, of those in `block_shapes` that are plain floating-point numbers and
            whose name ends in `.weight`.
        others: all other tensors.
        stacks: names and shapes of tensors inside numbered blocks that may hold a matrix of each expert.
        parameters: numbers in all floating-point tensors.
        stored_bytes: bytes of all tensors in the files.
        decoded_bytes: bytes of all tensors once weights in few bits are decoded.
        block_parameters: numbers in the floating-point tensors of each numbered block, by its name.
        tensors: number of tensors.
        largest_dimension: the largest dimension of any tensor that holds numbers.
        largest_tensor: numbers in the largest tensor.
    """

    dtype_bytes: Mapping[str, int]
    block_shapes: Mapping[tuple[int, int], int]
    matrices: tuple[tuple[str, tuple[int, int]], ...] = ()
    others: tuple[TensorHeader, ...] = ()
    stacks: tuple[tuple[str, Stack], ...] = ()
    parameters: int = 0
    stored_bytes: int = 0
    decoded_bytes: int = 0
    block_parameters: Mapping[str, int] = field(default_factory=dict)
    tensors: int = 0
    largest_dimension: int = 0
    largest_tensor: int = 0


def summarize(headers: Iterable[TensorHeader]) -> WeightSummary:
    """Count dtypes, shapes and sizes. A tensor without numbers only counts as a tensor."""
    dtypes: Counter[str] = Counter()
    shapes: Counter[tuple[int, int]] = Counter()
    blocks: Counter[str] = Counter()
    matrices: list[tuple[str, tuple[int, int]]] = []
    others: list[TensorHeader] = []
    stacks: list[tuple[str, Stack]] = []
    parameters = stored = decoded = tensors = largest_dimension = largest_tensor = 0
    for header in headers:
        tensors += 1
        if not header.nbytes:
            others.append(header)
            continue
        block, is_plain = _IN_A_BLOCK.search(header.key), header.dtype in FLOAT_DTYPES
        count = header.numbers if is_plain else 0
        parameters += count
        stored += header.file_bytes
        decoded += header.nbytes
        largest_tensor = max(largest_tensor, header.numbers)
        largest_dimension = max(largest_dimension, *header.shape, 1)
        if block:
            blocks[header.key[: block.end() - 1]] += count
        if len(header.shape) >= 2:
            dtypes[header.dtype] += header.nbytes
        name = header.key.removesuffix(_WEIGHT)
        shape = (header.shape[0], header.shape[1]) if len(header.shape) == 2 and block else None
        if shape is not None:
            shapes[shape] += 1
        if shape is not None and is_plain and name != header.key:
            matrices.append((name, shape))
        else:
            others.append(header)
        stack = stack_of(name, header.shape) if block else None
        if stack is not None:
            stacks.append((name, stack))
            shapes.update(dict.fromkeys(possible_shapes(stack), stack[0]))
    return WeightSummary(
        dtype_bytes=dtypes,
        block_shapes=shapes,
        matrices=tuple(matrices),
        others=tuple(others),
        stacks=tuple(stacks),
        parameters=parameters,
        stored_bytes=stored,
        decoded_bytes=decoded,
        block_parameters=blocks,
        tensors=tensors,
        largest_dimension=largest_dimension,
        largest_tensor=largest_tensor,
    )


def summarize_files(
    files: Iterable[Iterable[TensorHeader]], name: str = "the model", coded: CodedFormat | None = None
) -> WeightSummary:
    """Return the summary of several files.

    Args:
        files: the headers of each file.
        name: name of the model in messages.
        coded: how weights in few bits are stored, which are counted as they are once decoded.

    Raises:
        AlreadyQuantizedError: no weight is coded like that.
        CheckpointFormatError: all files together have more tensors than one file may have.
    """

    def limited() -> Iterator[TensorHeader]:
        for number, header in enumerate(itertools.chain.from_iterable(files)):
            if number >= MAX_TENSORS:
                raise CheckpointFormatError(f"{name} has more than {MAX_TENSORS} tensors; merge some of them")
            yield header

    return summarize(limited() if coded is None else coded.decoded(limited(), name))


def storage_dtype(weights: WeightSummary, model: str) -> str:
    """Return the dtype in which most bytes of the weight matrices are stored, one of `FLOAT_DTYPES`.

    Args:
        weights: summary of the checkpoint's weights.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: it is not a plain floating-point dtype.
    """
    stored = max(weights.dtype_bytes, key=lambda dtype: weights.dtype_bytes[dtype], default="none")
    if stored not in FLOAT_DTYPES:
        raise AlreadyQuantizedError(
            f"most weights in {model} are stored as {stored}, not as plain floating-point numbers; start from the "
            "original weights"
        )
    return stored


def item_bytes(weights: WeightSummary, dtype: str, model: str) -> int:
    """Return the bytes of a number in the artifacts.

    Args:
        weights: summary of the safetensors headers.
        dtype: dtype of the artifacts; `auto` is the checkpoint's own.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: the checkpoint's dtype is not a plain floating-point one.
    """
    return ITEM_BYTES[storage_dtype(weights, model) if dtype == "auto" else dtype]
