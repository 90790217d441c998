"""Memory limits of the processes of an attempt, set by the attempt alone."""

import logging
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from app.shared.confinement import MemoryGroup
from rocket_core.errors import InsufficientMemoryError
from rocket_core.system.machine import gibibytes, machine_memory

# The interpreter, torch and transformers, a tokenizer, and the calibration text: everything loaded before the
# requirement is known. Each thread reserves memory for its stack and its heap.
_BASE_BYTES = 4 * 2**30
_THREAD_BYTES = 2**26
# Address space that an accelerator's driver reserves in the process; not measured, and far more than it uses.
_DRIVER_BYTES = 16 * 2**30
_ACCELERATORS = ("nvidia[0-9]*", "kfd")
# A heuristic: estimates are not exact, and the limit only has to stop a process that takes many times as much.
_MARGIN = 2

_log = logging.getLogger(__name__)


def group_name(fence: str) -> str:
    """Return the name of the control group of an attempt, by its fence."""
    return f"rocket-{fence}"


class MemoryLimit:
    """Memory limit of one process: on what it reserves, and on what it uses where a control group can be created.

    The attempt sets both, and lowers the hard limit to the soft one, so that the process can raise neither.

    Args:
        name: unique name of the control group.
        cap: most bytes that any job may have; None means no limit.
        accelerated: whether the process may use an accelerator, if there is one.
    """

    def __init__(self, name: str, *, cap: int | None, accelerated: bool = False) -> None:
        self._cap = cap
        driver = _DRIVER_BYTES if accelerated and _has_accelerator() else 0
        self._base = self._capped(_BASE_BYTES + _THREAD_BYTES * (os.cpu_count() or 1) + driver)
        self._machine = machine_memory()
        self._group = MemoryGroup.try_create(name, self._base)
        self._pid: int | None = None

    def add(self, pid: int, *, is_raised: bool) -> None:
        """Limit a process until its requirement is known.

        Args:
            pid: its id.
            is_raised: whether `raise_for` may be called later; no process without privileges can raise a hard limit.
        """
        self._pid = pid
        # A process that has already ended closes its channel, which is noticed there.
        with suppress(ProcessLookupError):
            if self._group is not None:
                self._group.add(pid)
            _limit_data(pid, self._base, self._limit_for(self._machine) if is_raised else self._base)

    def raise_for(self, memory_bytes: int) -> None:
        """Raise the limit for a run, for good.

        Args:
            memory_bytes: estimated requirement of the run, which its process reports and which may be any number.

        Raises:
            InsufficientMemoryError: the run needs more than any job may have.
        """
        if self._cap is not None and memory_bytes > self._cap:
            raise InsufficientMemoryError(
                f"the job needs about {gibibytes(memory_bytes)} of memory, and this service allows a job "
                f"{gibibytes(self._cap)}; use fewer or shorter samples, or raise ROCKET_MAX_JOB_MEMORY_BYTES"
            )
        limit = self._limit_for(memory_bytes)
        if self._group is not None:
            try:
                self._group.set_limit(min(limit, self._machine))
            except OSError as error:
                _log.warning("cannot raise the memory limit of the job's control group: %s", error)
        if self._pid is not None:
            with suppress(ProcessLookupError):
                _limit_data(self._pid, limit, limit)

    def was_exceeded(self) -> bool:
        """Return whether the kernel killed a process for exceeding the limit."""
        return self._group is not None and self._group.was_exceeded()

    def remove(self) -> None:
        """Remove the group; its processes must have ended."""
        if self._group is not None:
            self._group.remove()

    def _limit_for(self, memory_bytes: int) -> int:
        return self._capped(self._base + min(_MARGIN * memory_bytes, self._machine))

    def _capped(self, byte_count: int) -> int:
        return byte_count if self._cap is None else min(byte_count, self._cap)


def _limit_data(pid: int, soft: int, hard: int) -> None:
    """Limit the private memory that a process reserves for writing, used or not; Linux only.

    Allocations above it fail with ENOMEM. A lower hard limit of the system still applies.
    """
    if sys.platform == "linux":
        _soft, most = resource.prlimit(pid, resource.RLIMIT_DATA)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))


def _has_accelerator() -> bool:
    return any(True for pattern in _ACCELERATORS for _ in Path("/dev").glob(pattern))
