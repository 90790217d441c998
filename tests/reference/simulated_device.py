"""An accelerator in Python, `sim:0`: it computes on the CPU, refuses what CUDA refuses, and counts.

Its tensors are those of torch's C++ core under the key PrivateUse1, so that autograd, views, `parameter.data = ...`
and subclasses work as on CUDA. Their storage is memory of the CPU; a fallback for all operations passes aliases of it
to the kernels of the CPU. Tensors are relabelled through DLPack, whose structure names the device.

Refused are: tensors of two devices in one operation, except numbers of the CPU in pointwise operations and indices;
`numpy()` and pinning; generators of the CPU; operations without a CUDA kernel, products of integer matrices, and linear
algebra in half precision. Counted are: launched operations, waits for values, copies between host and device with their
bytes, and allocated memory, in blocks of 512 bytes as the caching allocator of CUDA has them.

What it cannot show: kernels of CUDA and their rounding, streams, asynchronous copies, memory that cuBLAS, cuSOLVER and
fused attention take for themselves.

`install` changes torch for the whole process and cannot be undone, so that tests with it run in a separate process.
"""

import collections
import contextlib
import ctypes
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "sim"
TOTAL_BYTES = 80 * 2**30
_BLOCK = 512  # bytes
_ROOT = Path(__file__).parents[2]

_PRODUCTS = {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"}
_LINALG = ("_linalg_", "cholesky", "geqrf", "linalg_", "lu_", "orgqr", "ormqr", "triangular_solve")
_LINALG_DTYPES = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_WAITS = {
    "_linalg_eigh",
    "_linalg_svd",
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "cholesky",
    "equal",
    "linalg_eig",
    "linalg_lstsq",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations that end only when their result, or the size of it, is on the host."""
_AUTOCAST = ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention")
"""Operations that `torch.autocast` runs in half precision."""
_INDEXING = {"_index_put_impl", "_unsafe_index", "_unsafe_index_put", "index", "index_put"}


@dataclass(kw_only=True, slots=True)
class Counts:
    """What the device has done since the last `clear`.

    Attributes:
        operations: launched operations by name; views and allocations launch nothing.
        waits: times that the host waited for a value, by cause.
        places: the same by the line of this project that waited.
        lines: launched operations by the line of this project that launched them.
        copies: copies by direction, `host to device`, `device to host` and `on device`.
        copied_bytes: bytes of the copies.
        dtypes: dtypes of the tensors of each operation.
    """

    operations: collections.Counter[str] = field(default_factory=collections.Counter)
    waits: collections.Counter[str] = field(default_factory=collections.Counter)
    places: collections.Counter[str] = field(default_factory=collections.Counter)
    lines: collections.Counter[str] = field(default_factory=collections.Counter)
    copies: collections.Counter[str] = field(default_factory=collections.Counter)
    copied_bytes: collections.Counter[str] = field(default_factory=collections.Counter)
    dtypes: dict[str, set[torch.dtype]] = field(default_factory=lambda: collections.defaultdict(set))

    def clear(self) -> None:
        """Start again."""
        for name in self.__slots__:
            getattr(self, name).clear()

    def launch(self, name: str) -> None:
        """Count an operation."""
        self.operations[name] += 1
        self.lines[_place(sys._getframe(1))] += 1

    def wait(self, cause: str) -> None:
        """Count that the host waits."""
        self.waits[cause] += 1
        self.places[f"{_place(sys._getframe(1))} {cause}"] += 1

    def copy(self, direction: str, size: int) -> None:
        """Count a copy; the host waits for what it reads."""
        self.copies[direction] += 1
        self.copied_bytes[direction] += size
        if direction == "device to host":
            self.wait(direction)


class Memory:
    """Bytes of the device's tensors."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self._blocks: dict[int, weakref.ref[torch.Tensor]] = {}

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor of the CPU, whose memory is that of a new one of the device, for as long as it lives."""
        size = -(-tensor.untyped_storage().nbytes() // _BLOCK) * _BLOCK
        key = id(tensor)

        def release(_: weakref.ref[torch.Tensor]) -> None:
            self.allocated -= size
            self._blocks.pop(key, None)

        self._blocks[key] = weakref.ref(tensor, release)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


counts = Counts()
listeners: list[Callable[[str, tuple[Any, ...]], None]] = []
"""Functions that are given the name and the arguments of each operation."""
memory = Memory()


def install() -> torch.device:
    """Make the device torch's accelerator, in this process and for good."""
    assert not torch.accelerator.is_available(), "torch has an accelerator already"
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    device = torch.device(NAME, 0)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty.memory_format", _empty, "PrivateUse1")
    kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in ("convolution", "convolution_backward"):  # which torch sends elsewhere on devices that are not its own
        kernels.impl(f"{name}_overrideable", partial(_run, getattr(torch.ops.aten, name).default), "PrivateUse1")
    for name, operator in _delegated():
        kernels.impl(name, partial(_run, operator), "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # torch would resolve these by a copy, and so for ever
        kernels.impl("_copy_from", torch.library.fallthrough_kernel, key)
    for name in _AUTOCAST:
        kernels.impl(name, partial(_in_half_precision, getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _installed.extend([library, kernels])  # without these their kernels would go
    for name, function in _ACCELERATOR.items():
        setattr(torch.accelerator, name, function)
    torch.UntypedStorage.clone = _clone_storage
    return device


_installed: list[torch.library.Library] = []


class _Module(backend_registration._DummyBackendModule):
    """`torch.sim`, as libraries ask for it."""

    def get_device_name(self, device: Any = None) -> str:
        return "simulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        counts.wait("synchronize")

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return memory.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.peak

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL_BYTES - memory.allocated, TOTAL_BYTES


def _reset_peak(device: Any = None) -> None:
    memory.peak = memory.allocated


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy, as `copy.deepcopy` of a tensor makes it; torch would ask an allocator in C++."""
    if storage.device.type == NAME:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=NAME).untyped_storage()
    else:
        copy = torch.UntypedStorage(storage.nbytes(), device=storage.device)
    return copy.copy_(storage)


# torch asks an allocator in C++ for these.
_ACCELERATOR = {
    "empty_cache": lambda: None,
    "get_memory_info": lambda device=None: (TOTAL_BYTES - memory.allocated, TOTAL_BYTES),
    "max_memory_allocated": lambda device=None: memory.peak,
    "memory_allocated": lambda device=None: memory.allocated,
    "memory_reserved": lambda device=None: memory.allocated,
    "max_memory_reserved": lambda device=None: memory.peak,
    "memory_stats": lambda device=None: {
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak,
    },
    "reset_peak_memory_stats": _reset_peak,
    "synchronize": lambda device=None: counts.wait("synchronize"),
}


class _DLPackHead(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _relabelled(tensor: torch.Tensor, device_type: int) -> torch.Tensor:
    """Return a tensor of the same memory on another device, which keeps the given one alive."""
    capsule = torch._C._to_dlpack(tensor)
    _DLPackHead.from_address(_capsule_pointer(capsule, b"dltensor")).device_type = device_type
    return torch._C._from_dlpack(capsule)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj():
        return _on_cpu(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(_on_cpu(torch._neg_view(tensor)))
    return _relabelled(tensor, _DLPACK_CPU) if tensor.device.type == NAME else tensor


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    memory.hold(tensor)
    return _relabelled(tensor, _DLPACK_EXTENSION)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Operation:
    """What is known of an operation from its schema."""

    name: str
    base: str
    views: bool
    allocates: bool
    missing: bool
    takes_numbers: bool
    tensors: frozenset[int]

    @classmethod
    @cache
    def of(cls, operator: torch._ops.OpOverload) -> "_Operation":
        schema = operator._schema
        name = schema.name.removeprefix("aten::")
        base = name.rstrip("_")
        views = any(value.alias_info and not value.alias_info.is_write for value in schema.returns)
        numbers = base in {"fill", "index_fill", "masked_fill", *_INDEXING}
        return cls(
            name=name,
            base=base,
            views=views or name in {"is_set_to", "set_"},
            allocates=name.startswith(("empty", "new_empty")),
            missing=operator.namespace != "aten" or name in _without_cuda(),
            takes_numbers=numbers or torch.Tag.pointwise in operator.tags,
            tensors=frozenset(i for i, value in enumerate(schema.arguments) if str(value.type) == "Tensor"),
        )


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return arguments or results with a function of all tensors in them."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)(_mapped(function, part) for part in value) if type(value) in {tuple, list} else value


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _in_half_precision(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation under `torch.autocast`."""
    dtype = torch.get_autocast_dtype(NAME)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return operator(*_mapped(cast, args), **{name: _mapped(cast, value) for name, value in kwargs.items()})


def _run(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run any operation of the device."""
    operation = _Operation.of(operator)
    if operation.base in {"_copy_from", "_copy_from_and_resize"}:
        return _copy(*args, **kwargs)
    if operation.name == "resize_":
        return _resize(*args, **kwargs)
    if operation.views:
        return operator.redispatch(_CPU_KERNELS, *args, **kwargs)
    given = list(_flat((*args, *kwargs.values())))
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if not operation.allocates:
        _check(operator, operation, args, given, tensors)
        _count(operation, args, kwargs, tensors)
    if operation.name == "histc" and not tensors[0].is_floating_point():  # which the CPU lacks and CUDA has
        found = operator(_on_cpu(tensors[0]).double(), *args[1:], **kwargs)
        return _on_device(found.to(tensors[0].dtype))
    aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != NAME:
            return tensor
        # An output without memory is resized, which a tensor from DLPack cannot be.
        empty = tensor.dim() == 1 and tensor.untyped_storage().nbytes() == 0
        alias = torch.empty(0, dtype=tensor.dtype) if empty else _relabelled(tensor, _DLPACK_CPU)
        aliases[id(alias)] = tensor, alias
        return alias

    def known(tensor: torch.Tensor) -> torch.Tensor:
        return aliases[id(tensor)][0] if id(tensor) in aliases else _on_device(tensor)

    cpu_args = _mapped(alias, args)
    cpu_kwargs = {
        name: torch.device("cpu") if isinstance(value, torch.device) else _mapped(alias, value)
        for name, value in kwargs.items()
    }
    # torch has made Python's numbers out of those that stood for tensors; some operations take them only so.
    numbers = any(i < len(args) and isinstance(args[i], (int, float, complex)) for i in operation.tensors)
    result = (operator.overloadpacket if numbers else operator)(*cpu_args, **cpu_kwargs)
    for tensor, changed in list(aliases.values()):
        if tensor.shape != changed.shape:
            _become(tensor, _on_device(changed))
    return _mapped(known, result) if type(result) in {tuple, list} or isinstance(result, torch.Tensor) else result


def _empty(size: list[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    return _on_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: list[int], stride: list[int], *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _on_device(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    devices = source.device.type == NAME, target.device.type == NAME
    direction = {(True, True): "on device", (True, False): "device to host", (False, True): "host to device"}[devices]
    counts.copy(direction, target.numel() * target.element_size())
    if direction == "on device":
        counts.launch("copy_")
    _on_cpu(target).copy_(_on_cpu(source))
    return target


def _resize(tensor: torch.Tensor, size: list[int], *, memory_format: Any = None) -> torch.Tensor:
    if torch.Size(size).numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        larger = torch.empty(size, dtype=tensor.dtype)
        larger.view(-1)[: tensor.numel()].copy_(_on_cpu(tensor).reshape(-1))
        _become(tensor, _on_device(larger))
        return tensor
    return torch.ops.aten.resize_.default.redispatch(_CPU_KERNELS, tensor, size, memory_format=memory_format)


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the memory, shape and strides of another."""
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _CPU_KERNELS, tensor, other.untyped_storage(), other.storage_offset(), other.shape, other.stride()
    )


def _check(
    operator: torch._ops.OpOverload,
    operation: _Operation,
    args: tuple[Any, ...],
    given: list[Any],
    tensors: list[torch.Tensor],
) -> None:
    """Refuse what CUDA refuses, with the same class of error."""
    if operation.missing:
        raise NotImplementedError(f"{operator} has no kernel for CUDA")
    others = [tensor for tensor in tensors if tensor.device.type != NAME]
    if others and operation.base in _INDEXING:  # indices may be on the CPU, and are copied
        moved = [index for index in args[1] if index is not None and index.device.type != NAME]
        for index in moved:
            counts.copy("host to device", index.numel() * index.element_size())
        others = [tensor for tensor in others if not any(tensor is index for index in moved)]
    if any(tensor.dim() or not operation.takes_numbers for tensor in others):
        raise RuntimeError(f"{operator}: Expected all tensors to be on the same device, but found {NAME}:0 and cpu!")
    if any(isinstance(value, torch.Generator) and value.device.type != NAME for value in given):
        raise RuntimeError(f"{operator}: Expected a '{NAME}' device type for generator but found 'cpu'")
    if operation.base in _PRODUCTS and not any(t.is_floating_point() or t.is_complex() for t in tensors):
        raise NotImplementedError(f'"{operation.base}_cuda" not implemented for {tensors[0].dtype}')
    is_linalg = operation.base.startswith(_LINALG) and "check_errors" not in operation.base
    if is_linalg and not any(tensor.dtype in _LINALG_DTYPES for tensor in tensors):
        raise NotImplementedError(f'"{operation.base}_cuda" not implemented for {tensors[0].dtype}')


@cache
def _listed_operations() -> tuple[tuple[str, str], ...]:
    """Return the names of all operations with their entries in torch's own list of kernels."""
    listed = files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml").read_text("utf-8")
    entries = re.split(r"^- func: ", listed, flags=re.MULTILINE)[1:]
    return tuple((entry.partition("(")[0], entry) for entry in entries)


@cache
def _without_cuda() -> frozenset[str]:
    """Return the operations that have a kernel for the CPU and none for CUDA."""
    kernels: dict[str, set[str]] = {}
    for name, entry in _listed_operations():
        keys = re.findall(r"^    ([A-Za-z0-9, ]+):", entry.partition("  dispatch:\n")[2], re.MULTILINE)
        kernels.setdefault(name.partition(".")[0], set()).update(*(key.split(", ") for key in keys))
    general = {
        "CUDA",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
        "CompositeImplicitAutograd",
    }
    return frozenset(name for name, keys in kernels.items() if "CPU" in keys and not keys & general)


def _delegated() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Yield the operations that torch would split into an allocation and one with `out=`, and CUDA does not."""
    for listed, entry in _listed_operations():
        if "\n  structured_delegate:" in entry:
            name, _, overload = listed.partition(".")
            yield listed, getattr(getattr(torch.ops.aten, name), overload or "default")


def _count(operation: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    name, base = operation.name, operation.base
    counts.launch(name)
    for listener in listeners:
        listener(name, args)
    counts.dtypes[name].update(tensor.dtype for tensor in tensors)
    if base in _WAITS or (base == "repeat_interleave" and kwargs.get("output_size") is None):
        counts.wait(name)
    elif base in _INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in {torch.bool, torch.uint8}]
        fills = len(args) > 2 and args[2].dim() == 0 and len(args[1]) == 1
        if masks and not fills:
            counts.wait("mask as index")


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the library."""
    while frame is not None:
        file = _in_library(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _in_library(file: str) -> Path | None:
    return Path(file).relative_to(_ROOT) if Path(file).is_relative_to(_ROOT / "rocket_core") else None
