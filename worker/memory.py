"""Memory limit of the process that computes."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from app.shared.confinement import MemoryGroup
from rocket_core.errors import InsufficientMemoryError
from rocket_core.system.machine import gibibytes

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
    """Memory limit of one process: the limit that it sets for itself, and a control group where one can be created.

    Args:
        name: unique name of the control group.
        cap: most bytes that any job may have; None means no limit.
        accelerated: whether the process may use an accelerator, if there is one.
    """

    def __init__(self, name: str, *, cap: int | None, accelerated: bool = False) -> None:
        self._cap = cap
        driver = _DRIVER_BYTES if accelerated and _has_accelerator() else 0
        self._base = self._capped(_BASE_BYTES + _THREAD_BYTES * (os.cpu_count() or 1) + driver)
        self._group = MemoryGroup.try_create(name, self._base)

    @property
    def base_bytes(self) -> int:
        """The limit until the requirement is known."""
        return self._base

    def add(self, pid: int) -> None:
        """Put a process into the group."""
        if self._group is not None:
            # A process that has already ended closes its channel, which is noticed there.
            with suppress(ProcessLookupError):
                self._group.add(pid)

    def raise_for(self, memory_bytes: int) -> int:
        """Raise the limit for a run.

        Args:
            memory_bytes: estimated requirement of the run.

        Returns:
            The new limit in bytes.

        Raises:
            InsufficientMemoryError: the run needs more than any job may have.
        """
        if self._cap is not None and memory_bytes > self._cap:
            raise InsufficientMemoryError(
                f"the job needs about {gibibytes(memory_bytes)} of memory, and this service allows a job "
                f"{gibibytes(self._cap)}; use fewer or shorter samples, or raise ROCKET_MAX_JOB_MEMORY_BYTES"
            )
        limit = self._capped(self._base + _MARGIN * memory_bytes)
        if self._group is not None:
            try:
                self._group.set_limit(limit)
            except OSError as error:
                _log.warning("cannot raise the memory limit of the job's control group: %s", error)
        return limit

    def was_exceeded(self) -> bool:
        """Return whether the kernel killed a process for exceeding the limit."""
        return self._group is not None and self._group.was_exceeded()

    def remove(self) -> None:
        """Remove the group; its processes must have ended."""
        if self._group is not None:
            self._group.remove()

    def _capped(self, byte_count: int) -> int:
        return byte_count if self._cap is None else min(byte_count, self._cap)


def _has_accelerator() -> bool:
    return any(True for pattern in _ACCELERATORS for _ in Path("/dev").glob(pattern))
