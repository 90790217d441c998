"""Memory of this process: the heap of the C library, and what is resident."""

import ctypes
import gc
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

# Parameters of glibc's `mallopt`.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD = 2**26
# What `return_grown_memory` keeps: at most so many bytes, and so much growth, as a part of resident memory.
_MUCH, _GROWTH = 2**29, 0.05


def keep_freed_memory() -> None:
    """Make the allocator keep what is freed, for the rest of this process, until `return_freed_memory` is called.

    By default glibc returns every tensor above 32 MB to the system as soon as it is freed, and the next one is fetched
    page by page: a quarter of the time of a compression. Other C libraries and systems are left as they are.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD)):
                mallopt(parameter, value)


def return_freed_memory() -> None:
    """Return freed memory to the system; without it the peak grows by what the allocator retains."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    _retained.settled = None


def return_grown_memory() -> None:
    """Return freed memory to the system if it is much, or the process has grown; for the end of each of equal parts.

    The next part needs as much as the last one, and would fetch the same pages again, for up to a tenth of its time.
    But between what is freed some is kept, so that the next part may not fit, and the process grows with each.
    """
    before, settled = _resident(), _retained.settled
    if settled is None or before > (1 + _GROWTH) * settled:
        return_freed_memory()
        if settled is None and before - _resident() <= _MUCH:
            _retained.settled = before


@dataclass(slots=True)
class _Retained:
    """Resident bytes of this process after a part that began with returned memory; None if that is not known."""

    settled: int | None = None


_retained = _Retained()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


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
