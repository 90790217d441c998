"""Artifacts in a folder, which several machines may share."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from app.shared.errors import StorageError
from app.shared.storage.folders import is_bound_to, old_entries
from app.shared.storage.store import (
    CHUNK_BYTES,
    ArtifactStore,
    StoredFile,
    capped,
    check_key,
    check_regular,
    new_key,
    storage_errors,
)
from rocket_core.system.files import sync_folder

_TEMPORARY = ".tmp"
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})


class LocalStore(ArtifactStore):
    """Artifacts in `artifacts` below a folder.

    Args:
        folder: the parent folder; created if needed.

    Raises:
        StorageError: the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._folder = folder / "artifacts"
        with storage_errors(self._folder):
            # The mode of an existing folder is left as it is.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, source: Path) -> StoredFile:
        """Store a file; without a second copy where the file system supports that."""
        check_regular(source)
        return self._publish(lambda temporary: _link_or_copy(source, temporary))

    def put_stream(self, chunks: Iterable[bytes], *, max_bytes: int) -> StoredFile:
        """Store a stream."""

        def write(temporary: Path) -> None:
            with temporary.open("xb") as stream:
                for chunk in capped(chunks, max_bytes):
                    stream.write(chunk)

        return self._publish(write)

    def read(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        with storage_errors(self._folder), self._open(key) as stream:
            stream.seek(start)
            left = stop - start
            while left > 0:
                chunk = stream.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise StorageError(
                        f"artifact file {key} in {self._folder} is truncated; restore it or retry the job"
                    )
                left -= len(chunk)
                yield chunk

    def remove(self, key: str) -> None:
        """Remove a file."""
        with storage_errors(self._folder):
            (self._folder / check_key(key)).unlink(missing_ok=True)

    def keys(self, *, before: float) -> list[str]:
        """Return the files stored before a time."""
        with storage_errors(self._folder):
            return old_entries(self._folder, before=before)

    def remove_unfinished(self, *, before: float) -> int:
        """Remove partially written files."""
        with storage_errors(self._folder):
            names = old_entries(self._folder, before=before, suffix=_TEMPORARY)
            for name in names:
                (self._folder / name).unlink(missing_ok=True)
        return len(names)

    def is_bound_to(self, database: str) -> bool:
        """Return whether the files belong to a database."""
        return is_bound_to(self._root, database)

    def check(self) -> None:
        """Write a file and remove it."""
        temporary = self._folder / (new_key() + _TEMPORARY)
        with storage_errors(self._folder):
            try:
                temporary.write_bytes(b"1")
            finally:
                temporary.unlink(missing_ok=True)

    def _publish(self, write: Callable[[Path], None]) -> StoredFile:
        """Write a temporary file, and rename it to its key once its content is on disk."""
        key = new_key()
        temporary = self._folder / (key + _TEMPORARY)
        try:
            with storage_errors(self._folder):
                write(temporary)
                with temporary.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    size = stream.tell()
                    os.fsync(stream.fileno())
                temporary.replace(self._folder / key)
                sync_folder(self._folder)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return StoredFile(key=key, size=size, sha256=digest)

    def _open(self, key: str) -> BinaryIO:
        path = self._folder / check_key(key)
        try:
            return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        except FileNotFoundError:
            raise StorageError(
                f"artifact file {key} is missing from {self._folder}; restore it or retry the job"
            ) from None


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)
