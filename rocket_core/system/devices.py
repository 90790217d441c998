"""The compute device and its free memory."""

from collections.abc import Iterator
from functools import cache

import psutil
import torch
from torch import Tensor

from rocket_core.errors import InvalidConfigError
from rocket_core.system.machine import free_container_memory, processor_name

# Bytes that are copied from an accelerator at once.
_COPIED_BYTES = 2**26


def resolve_device(name: str) -> torch.device:
    """Return the device for a name given by the user.

    Args:
        name: `auto` (the accelerator if there is one, else the CPU) or a torch device such as `cpu`.

    Raises:
        InvalidConfigError: the device does not exist or cannot be used.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise InvalidConfigError(f"device {name!r} cannot be used here ({reason}); try auto or cpu") from error
    return device


def resolve_devices(name: str) -> tuple[torch.device, ...]:
    """Return the devices for a name given by the user, each of which computes in its own process.

    Args:
        name: `auto`; a kind of accelerator such as `cuda`, which stands for all that torch sees; or devices, separated
            by commas, such as `cuda:0,cuda:2`. One that is named twice gets two processes.

    Raises:
        InvalidConfigError: a device does not exist or cannot be used, or they are of several kinds.
    """
    devices = tuple(resolve_device(part.strip()) for part in name.split(","))
    if len({device.type for device in devices}) > 1:
        raise InvalidConfigError(f"device {name!r} names several kinds of devices; name those of one")
    [first, *more] = devices
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not more and first.index is None and accelerator is not None and first.type == accelerator.type:
        count = torch.accelerator.device_count()
        return devices if count < 2 else tuple(torch.device(first.type, index) for index in range(count))
    return devices


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a model is calibrated fast on a device.

    Most CPUs convert float16 and bfloat16 numbers one by one, which takes 3 to 20 times as long as computing in
    float32, of which every such number is an exact value. Some multiply bfloat16 matrices themselves. Every other dtype
    runs as it is stored.

    Args:
        stored: dtype of the weights in the checkpoint.
        device: device that the model runs on.
    """
    if device.type != "cpu" or stored.itemsize != 2 or (stored == torch.bfloat16 and multiplies_bfloat16()):
        return stored
    return torch.float32


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16 matrices."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def free_memory(device: torch.device) -> int:
    """Return the bytes that a computation on the device may still use."""
    if device.type == "cpu":
        available, container = int(psutil.virtual_memory().available), free_container_memory()
        return available if container is None else min(available, container)
    return int(torch.accelerator.get_memory_info(device)[0])


def bytes_on_host(data: Tensor) -> Iterator[bytes]:
    """Yield a tensor of bytes in parts, those of an accelerator's through pinned memory.

    To other memory, an H100 copies 1.3 GB/s instead of 54.
    """
    if data.device.type == "cpu":
        yield data.numpy().tobytes()
        return
    size = min(len(data), _COPIED_BYTES)
    try:
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except NotImplementedError:  # the accelerator has no such memory
        staged = torch.empty(size, dtype=torch.uint8)
    for part in torch.split(data, _COPIED_BYTES):
        yield staged[: len(part)].copy_(part).numpy().tobytes()


def device_name(device: torch.device) -> str:
    """Return a readable device name: the accelerator's, or the processor's with the number of threads used."""
    if device.type == "cpu":
        count = torch.get_num_threads()
        return f"{processor_name()}, {count} thread{'' if count == 1 else 's'}"
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name_of is None else str(name_of(device))


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of `peak_memory`."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the largest number of bytes allocated on an accelerator since the last reset; None for the CPU."""
    return None if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))
