"""Memory of this process: the heap of the C library, and what is resident."""

import ctypes
import gc
import sys
from collections.abc import Collection
from pathlib import Path

import psutil

_M_MMAP_THRESHOLD = -3
_LARGE_TENSOR = 2**20


def map_large_tensors() -> None:
    """Make the allocator map and unmap large tensors individually, for the rest of this process.

    By default glibc soon serves them from its heap, where memory freed between two live blocks stays with the process.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only; other C libraries have no such heap
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGE_TENSOR)


def return_freed_memory() -> None:
    """Return freed memory to the system; without it the peak grows by what the allocator retains."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(files: Collection[Path]) -> int | None:
    """Return the bytes of this process that are in memory: its own, and the parts of some files that it has mapped.

    Weights may be either. Mapped libraries are neither: their pages appear while a model runs for the first time.

    Args:
        files: files of the model.

    Returns:
        The bytes; None if this system does not report them.
    """
    if sys.platform != "linux":
        return None
    gc.collect()
    return_freed_memory()
    names = {str(file.resolve()) for file in files}
    maps = psutil.Process().memory_maps(grouped=True)
    return sum(int(part.rss if part.path in names else part.anonymous) for part in maps)
