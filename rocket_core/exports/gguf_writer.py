"""Writing of a model's GGUF file from tensors that are produced one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rocket_core.exports.gguf_file import GgufTensor, Storage, write_gguf
from rocket_core.exports.gguf_model import GgufPlan
from rocket_core.exports.gguf_tensors import PlannedTensor, TensorRules
from rocket_core.report.run_commands import GGUF_NAME, PROJECTOR_NAME
from rocket_core.system.files import Opener, atomic_write

_DTYPES: dict[Storage, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORAGES: dict[torch.dtype, Storage] = {torch.float64: "F32", **{dtype: name for name, dtype in _DTYPES.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufSource:
    """A tensor of a checkpoint that is to be written.

    Attributes:
        key: its name in the checkpoint.
        shape: its shape.
        storage: how matrices are to be stored; vectors are stored as F32.
        read: returns for block types the bytes of all rows (see `pack_blocks`), else the tensor, in the checkpoint's
            order of rows; called once.
    """

    key: str
    shape: tuple[int, ...]
    storage: Storage
    read: Callable[[], Tensor]


def gguf_storage(dtype: torch.dtype) -> Storage:
    """Return how a GGUF file stores matrices that stay dense."""
    return _STORAGES[dtype]


def modelfile(plan: GgufPlan) -> str:
    """Return what Ollama reads to find the files of a plan."""
    names = [GGUF_NAME, *([] if plan.projector is None else [PROJECTOR_NAME])]
    return "".join(f"FROM ./{name}\n" for name in names)


def write_model(
    path: Path,
    plan: GgufPlan,
    sources: Sequence[GgufSource],
    *,
    on_tensor: Callable[[str], None] = lambda _name: None,
    opener: Opener = atomic_write,
) -> int:
    """Write the file and the projector file of a plan; return their size, which is `plan.file_bytes` of the sources.

    One tensor of the checkpoint is in memory at a time.

    Args:
        path: the file; that of a projector gets the name `PROJECTOR_NAME`, next to it.
        plan: what it contains.
        sources: the tensors of the checkpoint, in the order in which they are written.
        on_tensor: called with the name of each source before it is written.
        opener: opens the file; `compared` compares one that is written already.

    Raises:
        UnsupportedExportError: llama.cpp has no such tensor.
    """
    by_key = {source.key: source for source in sources}
    stored = [(source.key, source.shape, source.storage) for source in sources]
    tensors = [_computed(name, values) for name, values in plan.computed.items()]
    tensors += [_stored(tensor, by_key, on_tensor) for tensor in plan.tensors(stored)]
    with opener(path) as stream:
        size = write_gguf(stream, plan.metadata, tensors)
    if plan.projector is not None:
        tensors = [_stored(tensor, by_key, on_tensor) for tensor in plan.projector.tensors(stored)]
        with opener(path.with_name(PROJECTOR_NAME)) as stream:
            size += write_gguf(stream, plan.projector.metadata, tensors)
    return size


def _computed(name: str, values: tuple[float, ...]) -> GgufTensor:
    def chunks() -> Iterator[bytes]:
        yield _bytes(torch.tensor(values, dtype=torch.float32))

    return GgufTensor(name=name, shape=(len(values),), storage="F32", chunks=chunks)


def _stored(tensor: PlannedTensor, sources: Mapping[str, GgufSource], on_tensor: Callable[[str], None]) -> GgufTensor:
    def chunks() -> Iterator[bytes]:
        for key, rules in tensor.parts.items():
            on_tensor(key)
            yield _bytes(_written(sources[key], rules, tensor.storage))

    return GgufTensor(name=tensor.name, shape=tensor.shape, storage=tensor.storage, chunks=chunks)


def _written(source: GgufSource, rules: TensorRules, storage: Storage) -> Tensor:
    tensor = source.read().detach().cpu()
    order = rules.row_order(source.shape[0])
    if order is not None:
        tensor = tensor[order]
    if storage in _DTYPES:
        assert tuple(tensor.shape) == source.shape, (source.key, tensor.shape, source.shape)
        shifted = tensor.float() + rules.shift if rules.shift else tensor
        tensor = shifted.to(_DTYPES[storage])
    return tensor


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
