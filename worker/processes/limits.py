"""Limits of the processes of an attempt, set by the attempt alone: memory, files, disk, processes and threads."""

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from app.shared.confinement import MemoryGroup
from app.shared.errors import DiskFullError
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
# Several pools of a thread for each processor, and far less than a machine can bear.
_THREADS, _THREADS_PER_PROCESSOR = 1024, 8
# Left on the disk of a job's files for the others who use it, the service and its database included.
_RESERVED_BYTES = 2**30
_RESERVED_SHARE = 0.05
# Sets the limit of a process of another user, as that user.
_SET_LIMIT = "import resource, sys; a = [*map(int, sys.argv[1:])]; resource.prlimit(a[0], a[1], (a[2], a[3]))"

_log = logging.getLogger(__name__)


def group_name(fence: str) -> str:
    """Return the name of the control group of an attempt, by its fence."""
    return f"rocket-{fence}"


class ProcessLimits:
    """Limits of one process and what it starts, which the process cannot raise.

    Its memory is limited by what it reserves, and by what it uses where a control group can be created.

    Args:
        name: unique name of the control group.
        folders: the folders that it writes to, at least one.
        cap: most bytes of memory that any job may have; None means no limit.
        accelerated: whether the process may use an accelerator, if there is one.
        user: user that it becomes; None if it keeps that of this process.
    """

    def __init__(
        self, name: str, folders: Sequence[Path], *, cap: int | None, accelerated: bool = False, user: int | None = None
    ) -> None:
        self._folders = tuple(folders)
        self._cap = cap
        self._user = user
        processors = os.cpu_count() or 1
        self._processes = _THREADS + _THREADS_PER_PROCESSOR * processors
        driver = _DRIVER_BYTES if accelerated and _has_accelerator() else 0
        self._base = self._capped(_BASE_BYTES + _THREAD_BYTES * processors + driver)
        self._machine = machine_memory()
        self._group = MemoryGroup.try_create(name, self._base, processes=self._processes)
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
            if sys.platform == "linux":
                _limit(pid, resource.RLIMIT_DATA, self._base, self._limit_for(self._machine) if is_raised else None)
                _limit(pid, resource.RLIMIT_CORE, 0)
                _limit(pid, resource.RLIMIT_FSIZE, max(0, *map(_spare_bytes, self._folders)))
                # The system counts those of the user, and never limits root.
                _limit(pid, resource.RLIMIT_NPROC, self._processes + _threads_of(self._user or os.getuid()))

    def check_disk(self) -> None:
        """Raise an error once little space is left on the disk.

        Raises:
            DiskFullError: less than the reserve is left.
        """
        if min(map(_spare_bytes, self._folders)) < 0:
            raise DiskFullError("the disk of the job's files is nearly full; free some space, then retry the job")

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
        if self._pid is not None and sys.platform == "linux":
            with suppress(ProcessLookupError):
                _limit(self._pid, resource.RLIMIT_DATA, limit, user=self._user)

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


def _spare_bytes(folder: Path) -> int:
    """Return the bytes that a process may still take of a folder's disk; negative where the reserve is not free."""
    usage = shutil.disk_usage(folder)
    return usage.free - min(_RESERVED_BYTES, int(_RESERVED_SHARE * usage.total))


def _limit(pid: int, kind: int, soft: int, hard: int | None = None, *, user: int | None = None) -> None:
    """Set a limit of a process, by default the hard one as well; a lower hard limit of the system still applies."""
    hard = soft if hard is None else hard
    if user is not None:
        _limit_as(user, pid, kind, soft, hard)
        return
    _soft, most = resource.prlimit(pid, kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.prlimit(pid, kind, (soft, hard))


def _limit_as(user: int, pid: int, kind: int, soft: int, hard: int) -> None:
    # Only a process of the same user may do so.
    subprocess.run(  # noqa: S603 - our own interpreter, code and numbers
        [sys.executable, "-c", _SET_LIMIT, *map(str, (pid, kind, soft, hard))],
        user=user,
        group=user,
        extra_groups=(),
        check=True,
    )


def _threads_of(user: int) -> int:
    """Return the number of threads that a user's processes have."""
    found = psutil.process_iter(["uids", "num_threads"])
    return sum(one.info["num_threads"] or 0 for one in found if one.info["uids"] and one.info["uids"].real == user)


def _has_accelerator() -> bool:
    return any(True for pattern in _ACCELERATORS for _ in Path("/dev").glob(pattern))
