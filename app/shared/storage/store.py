"""The interface of all artifact stores."""

import hashlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.shared.errors import DiskFullError, OverQuotaError, StorageError, is_disk_full
from rocket_core.system.files import atomic_write

KEY = re.compile(r"[0-9a-f]{32}")
"""Format of keys."""

CHUNK_BYTES = 2**18
"""Size of the pieces that files are read in, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file in the artifact store.

    Attributes:
        key: its key in the store.
        size: size in bytes.
        sha256: hash of its content, hexadecimal.
    """

    key: str
    size: int
    sha256: str


class ArtifactStore(ABC):
    """Files that never change, under keys chosen by the store; each is complete and durable, or does not exist.

    A store may be used by several threads and machines at once. Every method raises `StorageError` if the store fails;
    if it does not answer, `StorageUnavailableError`, a subclass, within a minute or so.
    """

    @abstractmethod
    def put(self, source: Path) -> StoredFile:
        """Store a file that is no longer written to.

        Raises:
            DiskFullError: the store is full.
            StorageError: it is not a regular file, or cannot be read or stored.
        """

    @abstractmethod
    def put_stream(self, chunks: Iterable[bytes], *, max_bytes: int) -> StoredFile:
        """Store a stream, in constant memory; if `chunks` raises, nothing is stored.

        Args:
            chunks: the content; may be iterated by another thread.
            max_bytes: upper bound on its length.

        Raises:
            OverQuotaError: the content is longer.
            DiskFullError: the store is full.
            StorageError: the content cannot be stored.
        """

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file, in pieces; close the iterator if not all are needed.

        Raises:
            StorageError: the file does not exist, or is shorter.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a file; no-op if it does not exist.

        Raises:
            StorageError: it cannot be removed.
        """

    @abstractmethod
    def keys(self, *, before: float) -> list[str]:
        """Return the files that were stored before a time.

        Args:
            before: seconds since the epoch; younger files may not have their row yet.
        """

    @abstractmethod
    def remove_unfinished(self, *, before: float) -> int:
        """Remove files whose storing was interrupted by crashes, and return their number.

        Args:
            before: seconds since the epoch; files that are still being stored have been added to since.
        """

    @abstractmethod
    def is_bound_to(self, database: str) -> bool:
        """Return whether the files belong to a database; the first one to ask becomes their owner.

        To another database, all of them would look like orphans.

        Args:
            database: the database's unique id.
        """

    @abstractmethod
    def check(self) -> None:
        """Write to the store, with a short timeout.

        Raises:
            StorageError: it cannot be written.
        """

    def presigned_url(self, key: str, *, filename: str, media_type: str) -> str | None:  # noqa: ARG002
        """Return an address where clients can read a file from the store itself for a few minutes; None if unsupported.

        Args:
            key: the file.
            filename: the name under which a browser saves it.
            media_type: media type that the store is to respond with.
        """
        return None

    def fetch(self, stored: StoredFile, target: Path) -> None:
        """Copy a file to this machine; afterwards the target is complete and has the right hash, or does not exist.

        Args:
            stored: the file, as returned when it was stored.
            target: path of the copy; replaced if it exists.

        Raises:
            DiskFullError: the target's disk is full.
            StorageError: the file is missing or damaged, or the target cannot be written.
        """
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
        digest = hashlib.sha256()
        with storage_errors(target.parent), atomic_write(target, temporary=temporary) as stream:
            for chunk in self.read(stored.key, 0, stored.size):
                digest.update(chunk)
                stream.write(chunk)
            if digest.hexdigest() != stored.sha256:
                raise StorageError(f"artifact file {stored.key} is damaged in the store; restore it or retry the job")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert operating system errors to storage errors that name the path they are about."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(f"no space left in {path}; free some space and retry") from error
        raise StorageError(f"cannot use {path}: {error.strerror or error}") from error


def new_key() -> str:
    """Return a new key."""
    return secrets.token_hex(16)


def check_key(key: str) -> str:
    """Return the key, if it is valid.

    Raises:
        StorageError: it is not valid, and must not become part of a path.
    """
    if not KEY.fullmatch(key):
        raise StorageError("not a storage key; expected 32 hexadecimal digits")
    return key


def check_regular(source: Path) -> None:
    """Raise an error unless a file may become an artifact.

    Raises:
        StorageError: it is a link, or not a regular file.
    """
    if source.is_symlink() or not source.is_file():
        raise StorageError(f"{source.name} is not a regular file; only regular files can be artifacts")


def capped(chunks: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the chunks; raise an error if they are too long.

    Raises:
        OverQuotaError: together they are longer than `max_bytes`.
    """
    total = 0
    for chunk in chunks:
        total += len(chunk)
        if total > max_bytes:
            raise OverQuotaError(f"the file is larger than the maximum of {max_bytes:,} bytes; send a smaller one")
        yield chunk
