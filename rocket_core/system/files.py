"""Atomic writes and locks: the only module that flushes folders and calls `flock`.

The library filelock covers too little of it: it has no shared `flock`, cannot lock a folder, and on file systems
without `flock` falls back to a lock that outlives a killed process.
"""

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

Opener: TypeAlias = Callable[[Path], AbstractContextManager[BinaryIO]]
"""A function that opens a file to be written."""


@contextmanager
def atomic_write(path: Path, *, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a stream to a file that appears under its name complete and flushed to disk, or not at all.

    Args:
        path: the file, replaced if it exists.
        temporary: file in the same folder to write first; None for a fixed name. Choose a unique one if several
            processes may write the file at once.
    """
    temporary = temporary or path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


class DifferentContentError(Exception):
    """A file holds other bytes than those that it was expected to hold."""


class _Comparison(io.RawIOBase):
    """A stream that reads a file instead of writing it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__()
        self._file, self._name = file, name

    def write(self, data: Any) -> int:
        position = self._file.tell()
        if self._file.read(len(data)) != data:
            raise DifferentContentError(f"{self._name} differs after byte {position:,} from what was written")
        return len(data)


@contextmanager
def compared(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream in place of that of `atomic_write`, which compares what is written with the file.

    Raises:
        DifferentContentError: they differ.
    """
    with path.open("rb") as file:
        yield cast("BinaryIO", _Comparison(file, path.name))
        if file.read(1):
            raise DifferentContentError(f"{path.name} is longer than what was written")


def sync_folder(folder: Path) -> None:
    """Make a rename within a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock on a file, which is created if needed, or on an existing folder.

    The OS releases it when this process dies, in whatever way; child programs do not inherit it.

    Args:
        path: the file, which must never be removed, or the folder.
        shared: share the lock with other shared holders; excludes only exclusive ones.

    Raises:
        BlockingIOError: another holder excludes this one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if not lock(descriptor, shared=shared):
            raise BlockingIOError(f"{path} is locked")
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed, or convert the lock that it has.

    A lock is converted by releasing and taking it, so a conversion that fails may lose it.

    Args:
        descriptor: the open file.
        shared: share the lock with other shared holders; excludes only exclusive ones.
        wait: wait for other holders.

    Returns:
        Whether it is locked; False if another holder excludes this one.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
