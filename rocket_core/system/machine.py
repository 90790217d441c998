"""Free resources of this machine, without any numerical library: memory that a container may still use, disk."""

import os
import platform
import shutil
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# Version 1 writes a number near 2**63 for unlimited.
_NO_LIMIT = 2**60


def free_disk(folder: Path) -> int:
    """Return the bytes that may still be written below a folder, which need not exist yet."""
    existing = next(ancestor for ancestor in (folder, *folder.absolute().parents) if ancestor.is_dir())
    return shutil.disk_usage(existing).free


def gibibytes(size: int) -> str:
    """Return the size of memory or of files as human-readable text: 1.50 GiB."""
    return f"{size / 2**30:.2f} GiB"


def free_container_memory(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int | None:
    """Return the bytes that this process's control groups still allow it; None without a limit.

    A container sees the memory of the whole machine as free, and is killed at its own limit. File pages that the
    kernel would drop first count as free.

    Args:
        cgroups: mount point of the control groups.
        proc: mount point of the proc file system.
    """
    left = [_left(folder) for folder in _groups("memory", cgroups, proc)]
    return min((size for size in left if size is not None), default=None)


def free_machine_memory() -> int | None:
    """Return the bytes of memory that a computation on the CPU may still use; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            container = free_container_memory()
            return available if container is None else min(available, container)
    return None


def machine_memory(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """Return the bytes of memory of this machine, or of the container that this process runs in.

    Args:
        cgroups: mount point of the control groups.
        proc: mount point of the proc file system.
    """
    limits = [_limit(folder) for folder in _groups("memory", cgroups, proc)]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit in limits if limit is not None)])


def usable_processors(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """Return the number of processors that this process may use, by its affinity and its control groups' quotas.

    Args:
        cgroups: mount point of the control groups.
        proc: mount point of the proc file system.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(folder) for folder in _groups("cpu", cgroups, proc)]
    return max(1, min([affinity, *(int(quota) for quota in quotas if quota is not None)]))


def processor_name(proc: Path = _PROC) -> str:
    """Return the processor's model name; its architecture if that is unknown."""
    for line in _text(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _groups(controller: str, cgroups: Path, proc: Path) -> list[Path]:
    """Return the folders of the groups that limit this process by a controller: its own and their parents."""
    groups: set[Path] = set()
    for line in _text(proc / "self" / "cgroup").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = cgroups / controller if controllers else cgroups
        own = mount / path.lstrip("/")
        # In a container the path may be the machine's, although only its end is mounted, as the root.
        groups |= {ancestor for ancestor in (own, *own.parents) if ancestor.is_relative_to(mount)}
    return sorted(groups)


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _text(folder / name)
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            return int(limit)
    return None


def _left(folder: Path) -> int | None:
    limit = _limit(folder)
    for name, dropped in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        used = _text(folder / name)
        if limit is not None and used.isdecimal():
            lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
            reclaimable = sum(int(words[1]) for words in lines if words[:1] == [dropped])
            return max(0, limit - int(used) + reclaimable)
    return None


def _quota(folder: Path) -> float | None:
    """Return the number of processors that a control group allows on average; None without a limit."""
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us"),
        _text(folder / "cpu.cfs_period_us"),
    ]
    # Version 2 writes `max` for unlimited, version 1 a negative number.
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
        return int(words[0]) / int(words[1])
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
