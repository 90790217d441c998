"""Quota of a Hub cache shared by several processes. Loads no torch.

A process that downloads or reads a model holds its repository: a shared lock on a file, which the kernel releases when
the process ends. Repositories that no process holds can be removed to make room, least recently used first. All
decisions are made under one exclusive lock of the cache, so that no two processes rely on the same room.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rocket_core.errors import HubCacheBusyError, InsufficientDiskError
from rocket_core.system.files import lock
from rocket_core.system.machine import gibibytes

# The Hub's client keeps its own locks in `.locks`, and does not treat anything there as a repository.
_LOCKS = Path(".locks", "rocket")
_DECISION = "decision.lock"
_SUFFIX = ".repository"
_REPOSITORIES = "models--*"
_REMOVED = ".removed-"

# Repositories that this process holds, until it ends: code that reads a model does not report when it has finished.
_held: dict[Path, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Room that a download needs in a cache.

    Attributes:
        repository: folder of the repository in the cache.
        commit: the commit to download.
        size: bytes of all files of the commit that are wanted.
        missing: bytes of those that are not in the cache.
    """

    repository: Path
    commit: str
    size: int
    missing: int


def hold(repository: Path) -> None:
    """Protect a repository from removal until this process ends.

    It becomes the most recently used one.

    Args:
        repository: folder of the repository in a cache, `CACHE/models--NAMESPACE--NAME`; it need not exist yet.
    """
    with _deciding(repository.parent):
        if repository not in _held:
            descriptor = _open(_lock_file(repository))
            if lock(descriptor):
                # No process holds it, so downloads that were started have ended, successfully or not.
                os.ftruncate(descriptor, 0)
            # It is not removed in the meantime: removal needs the lock of the cache, which this process holds.
            lock(descriptor, shared=True, wait=True)
            _held[repository] = descriptor
        # By its descriptor: a confined process cannot set the times of a path.
        os.utime(_held[repository])


def release(repository: Path) -> None:
    """Release a repository before this process ends.

    Args:
        repository: its folder, as passed to `hold`.
    """
    descriptor = _held.pop(repository, None)
    if descriptor is not None:
        os.close(descriptor)


def make_room(quota_bytes: int, room: Room) -> None:
    """Remove repositories that no process holds until a download fits into the quota, and reserve its room.

    The least recently used ones go first. Other commits of the same repository go last, if only this process holds it.
    Downloads that other processes have started count with their full size. The repository must be held.

    Args:
        quota_bytes: bytes that the models in the cache may take.
        room: room that the download needs.

    Raises:
        InsufficientDiskError: the model alone exceeds the quota.
        HubCacheBusyError: repositories held by other processes leave too little of the quota.
    """
    cache = room.repository.parent
    if room.missing and room.size > quota_bytes:
        raise InsufficientDiskError(
            f"the model takes {gibibytes(room.size)} in the Hub cache {cache}, whose quota is "
            f"{gibibytes(quota_bytes)}; choose a smaller model, or have the operator raise ROCKET_HUB_CACHE_BYTES"
        )
    with _deciding(cache):
        if room.missing:
            _reserve(room)
        over = _evict(quota_bytes, room)
        if over > 0 and room.missing:
            _reserve(room, remove=True)
            raise HubCacheBusyError(
                f"the model takes {gibibytes(room.size)} in the Hub cache {cache}, "
                f"{gibibytes(over)} more than running jobs leave of its quota of {gibibytes(quota_bytes)}; try again "
                "when they have ended, or have the operator raise ROCKET_HUB_CACHE_BYTES"
            )


def _evict(quota_bytes: int, room: Room) -> int:
    """Remove repositories that no process holds until the quota is met; return the bytes by which it is exceeded."""
    cache = room.repository.parent
    for remains in cache.glob(f"{_REMOVED}*"):
        shutil.rmtree(remains)
    taken = {repository: _taken(repository) for repository in _repositories(cache) | {room.repository}}
    over = sum(taken.values()) - quota_bytes
    for repository in sorted(taken, key=_last_use):
        if over <= 0:
            return over
        if repository != room.repository and _remove(repository):
            over -= taken[repository]
    if over > 0:
        over -= _remove_other_commits(room)
    return over


def _repositories(cache: Path) -> set[Path]:
    """Return the repositories in the cache, and those that a process has started to download."""
    present = {folder for folder in cache.glob(_REPOSITORIES) if folder.is_dir() and not folder.is_symlink()}
    return present | {cache / file.stem for file in (cache / _LOCKS).glob(f"{_REPOSITORIES}{_SUFFIX}")}


def _taken(repository: Path) -> int:
    """Return the bytes that a repository takes, or will take once the downloads in progress are complete."""
    return max(_size(repository), sum(_reservations(repository).values()))


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder; each file counts once, however many links point to it."""
    total = 0
    for current, _folders, files in os.walk(folder):
        for name in files:
            # Another process may be downloading: temporary files come and go.
            with suppress(FileNotFoundError):
                file = Path(current, name)
                total += 0 if file.is_symlink() else file.stat().st_size
    return total


def _last_use(repository: Path) -> float:
    """Return when a process last held a repository; if none has, when it was created."""
    for path in (_lock_file(repository), repository):
        with suppress(FileNotFoundError):
            return path.stat().st_mtime
    return 0.0


def _remove(repository: Path) -> bool:
    """Remove a repository unless a process holds it; return whether it is gone."""
    with _opened(_lock_file(repository)) as descriptor:
        if not lock(descriptor):
            return False
        # Renamed first, so that a process killed here does not leave a partial repository that looks complete.
        doomed = repository.with_name(f"{_REMOVED}{repository.name}")
        with suppress(FileNotFoundError):
            repository.rename(doomed)
            shutil.rmtree(doomed)
        os.ftruncate(descriptor, 0)
    return True


def _remove_other_commits(room: Room) -> int:
    """Remove the unwanted commits of a repository if no other process holds it; return the bytes freed."""
    before = _size(room.repository)
    if not _is_held_here_alone(room.repository):
        return 0
    snapshots = room.repository / "snapshots"
    for snapshot in [*snapshots.iterdir()] if snapshots.is_dir() else ():
        if snapshot.name != room.commit:
            shutil.rmtree(snapshot)
    for ref in (room.repository / "refs").rglob("*"):
        if ref.is_file() and ref.read_text(encoding="utf-8").strip() != room.commit:
            ref.unlink()
    needed = {file.resolve() for file in snapshots.rglob("*") if file.is_symlink()}
    for blob in (room.repository / "blobs").glob("*"):
        if blob.resolve() not in needed:
            blob.unlink()
    return before - _size(room.repository)


def _is_held_here_alone(repository: Path) -> bool:
    """Return whether no other process holds a repository; this process continues to hold it."""
    descriptor = _held[repository]
    try:
        return lock(descriptor)
    finally:
        # A lock that could not be converted may have been lost.
        lock(descriptor, shared=True, wait=True)


def _reserve(room: Room, *, remove: bool = False) -> None:
    """Add or remove a reservation of a repository's bytes; it is valid while any process holds the repository."""
    reservations = {**_reservations(room.repository), room.commit: room.size}
    if remove:
        del reservations[room.commit]
    descriptor = _held[room.repository]
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(reservations).encode(), 0)


def _reservations(repository: Path) -> Mapping[str, int]:
    """Return the sizes of the commits that processes holding a repository have started to download."""
    file = _lock_file(repository)
    with suppress(FileNotFoundError, ValueError):
        reservations = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(reservations, dict) and all(isinstance(size, int) for size in reservations.values()):
            return reservations if repository in _held or _is_held_elsewhere(file) else {}
    return {}


def _is_held_elsewhere(file: Path) -> bool:
    with _opened(file) as descriptor:
        return not lock(descriptor)


def _lock_file(repository: Path) -> Path:
    return repository.parent / _LOCKS / f"{repository.name}{_SUFFIX}"


def _open(file: Path) -> int:
    """Open a lock file. Lock files are never removed, because a lock on a removed file excludes no process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not inherited: a child process that outlives this one would keep the lock.
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    descriptor = _open(file)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _deciding(cache: Path) -> Iterator[None]:
    """Exclude all other processes that hold, reserve or remove in this cache."""
    with _opened(cache / _LOCKS / _DECISION) as descriptor:
        lock(descriptor, wait=True)
        yield
