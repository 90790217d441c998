"""Limits of a process: by a control group where one can be created, and on its own memory."""

import logging
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_log = logging.getLogger(__name__)


def limit_memory(byte_count: int) -> None:
    """Limit the private memory of this process for good; allocations above it fail with ENOMEM.

    Counts what is reserved for writing (heap, anonymous mappings, thread stacks), used or not; mapped files and shared
    memory are not counted.

    Args:
        byte_count: value of RLIMIT_DATA, > 0; a lower hard limit of the system still applies.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = byte_count if hard == resource.RLIM_INFINITY else min(byte_count, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """Names of the files in the two versions of control groups.

    Attributes:
        limit: file of the limit.
        swap_limit: file of the limit on swap; missing where the system has no swap accounting.
        counts_both: whether that limit is on memory and swap together.
        events: file that counts killed processes.
    """

    limit: str
    swap_limit: str
    counts_both: bool
    events: str


_SECOND = _Names(limit="memory.max", swap_limit="memory.swap.max", counts_both=False, events="memory.events")
_FIRST = _Names(
    limit="memory.limit_in_bytes",
    swap_limit="memory.memsw.limit_in_bytes",
    counts_both=True,
    events="memory.oom_control",
)


class MemoryGroup:
    """A control group for one job's processes, which the kernel kills when they exceed the limit of memory.

    Unlike `limit_memory`, it counts used memory, of all its processes together. It also limits how many they are, where
    the system can.
    """

    def __init__(self, folder: Path, names: _Names) -> None:
        self._folder = folder
        self._names = names
        # The first version has a hierarchy of folders for each kind of limit.
        self._counting = [parent / folder.name for parent in _groups("pids")] if names is _FIRST else []

    @classmethod
    def try_create(cls, name: str, byte_count: int, *, processes: int) -> "MemoryGroup | None":
        """Return a new group, or None where this process may not create one, as in most containers.

        Args:
            name: unique name of the group's folder.
            byte_count: the limit of memory, > 0.
            processes: the limit of processes and threads, > 0.
        """
        for parent, names in _parents():
            folder = parent / name
            try:
                folder.mkdir()
            except OSError:
                continue
            group = cls(folder, names)
            try:
                group.set_limit(byte_count)
            except OSError as error:
                _log.debug("no memory limit in %s: %s", folder, error)
                group.remove()
                continue
            group._limit_processes(processes)
            return group
        return None

    @classmethod
    def remove_left(cls, name: str) -> None:
        """Remove the group of that name, if a killed process has left it; its processes must have ended."""
        for parent, names in _parents():
            if (parent / name).is_dir():
                cls(parent / name, names).remove()

    def add(self, pid: int) -> None:
        """Move a process, and the children that it starts from now on, into the group.

        Raises:
            OSError: the process has ended, or may not be moved.
        """
        for folder in (self._folder, *self._counting):
            _write(folder / "cgroup.procs", str(pid))

    def set_limit(self, byte_count: int) -> None:
        """Change the limit.

        Raises:
            OSError: the kernel refuses it.
        """
        limit, swap = self._folder / self._names.limit, self._folder / self._names.swap_limit
        if not swap.exists():
            _write(limit, str(byte_count))
        elif self._names.counts_both:
            # The combined limit may never be less than that of memory: raised first, lowered last.
            with suppress(OSError):
                _write(swap, str(byte_count))
            _write(limit, str(byte_count))
            _write(swap, str(byte_count))
        else:
            _write(limit, str(byte_count))
            _write(swap, "0")

    def was_exceeded(self) -> bool:
        """Return whether the kernel has killed a process of the group for its memory."""
        try:
            lines = (self._folder / self._names.events).read_text(encoding="ascii").splitlines()
        except OSError:
            return False
        counts = dict(line.split() for line in lines if len(line.split()) == 2)
        return int(counts.get("oom_kill", "0")) > 0

    def remove(self) -> None:
        """Remove the group, whose processes must have ended; failures are logged only."""
        for folder in (self._folder, *self._counting):
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("cannot remove the control group %s: %s", folder, error)

    def _limit_processes(self, most: int) -> None:
        try:
            for folder in self._counting:
                folder.mkdir(exist_ok=True)
            for folder in self._counting or [self._folder]:
                _write(folder / "pids.max", str(most))
        except OSError as error:
            _log.debug("no limit of processes in %s: %s", self._folder, error)
            self._counting = []


def _parents() -> list[tuple[Path, _Names]]:
    """Return groups in which this process might create its own, the nearest first."""
    # A group with processes in it cannot delegate memory to groups below; its parent may.
    second = [group for own in _groups("") for group in (own, own.parent) if _delegates_memory(group)]
    groups = [*((group, _SECOND) for group in second), *((group, _FIRST) for group in _groups("memory"))]
    return [(group, names) for group, names in groups if group.is_dir() and os.access(group, os.W_OK)]


def _groups(controller: str) -> list[Path]:
    """Return the group of this process in a controller's hierarchy, if any; "" names that of the second version."""
    lines = (line.split(":", 2) for line in _lines(_PROC / "self" / "cgroup"))
    mount = _CGROUPS / controller
    return [mount / path.lstrip("/") for _number, names, path in lines if controller in names.split(",")]


def _delegates_memory(group: Path) -> bool:
    return any("memory" in line.split() for line in _lines(group / "cgroup.subtree_control"))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _write(file: Path, text: str) -> None:
    # In one write and without creating: a missing file means that the limit does not exist here.
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
