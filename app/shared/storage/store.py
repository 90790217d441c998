"""What every artifact store can do, wherever its files lie."""

import hashlib
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.shared.errors import OverQuotaError, StorageError
from app.shared.storage.faults import storage_errors

KEY = re.compile(r"[0-9a-f]{32}")
"""What every key looks like."""

CHUNK_BYTES = 2**18
"""Size of the pieces that files are read in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file in the artifact store.

    Attributes:
        key: its name there.
        size: bytes.
        sha256: hash of its content, hexadecimal.
    """

    key: str
    size: int
    sha256: str


class ArtifactStore(ABC):
    """Files that never change, under keys of the store's choice; each is there complete and durable, or not at all.

    A store may be used by several threads, and by several machines at once. Each of its functions raises `StorageError`
    if the store cannot do it, and the `StorageUnavailableError` among them, within a minute or so, if it does not
    answer.
    """

    @abstractmethod
    def put(self, source: Path) -> StoredFile:
        """Stores a file that nobody writes to any more.

        Raises:
            DiskFullError: there is no room.
            StorageError: it is no regular file, or cannot be read or stored.
        """

    @abstractmethod
    def put_stream(self, chunks: Iterable[bytes], *, max_bytes: int) -> StoredFile:
        """Stores what comes, in constant memory; if `chunks` raises, nothing is stored.

        Args:
            chunks: the content; another thread may ask for it.
            max_bytes: how long it may be.

        Raises:
            OverQuotaError: it is longer.
            DiskFullError: there is no room.
            StorageError: it cannot be stored.
        """

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop) of a file, in pieces; close the iterator if they are not all wanted.

        Raises:
            StorageError: there is no such file, or it is shorter.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Removes a file; one that is gone already is no error.

        Raises:
            StorageError: it cannot be removed.
        """

    @abstractmethod
    def keys(self, *, before: float) -> list[str]:
        """Files that were stored before a time.

        Args:
            before: seconds since the epoch; younger files may await the row that will name them.
        """

    @abstractmethod
    def remove_unfinished(self, *, before: float) -> int:
        """Removes what crashes have left of files that were being stored, and says of how many.

        Args:
            before: seconds since the epoch; to what is still being stored, something was added after that.
        """

    @abstractmethod
    def is_bound_to(self, database: str) -> bool:
        """Whether the files are those of a database; the first one to ask makes them its own.

        To another database all of them look as if they belonged to nothing.

        Args:
            database: what tells the database from all others.
        """

    @abstractmethod
    def check(self) -> None:
        """Writes to the store, without patience.

        Raises:
            StorageError: it cannot be written.
        """

    def presigned_url(self, key: str, *, filename: str, media_type: str) -> str | None:  # noqa: ARG002
        """Where a client can read a file from the store itself for a few minutes; None if it cannot.

        Args:
            key: the file.
            filename: the name under which a browser saves it.
            media_type: what the store shall say that it is.
        """
        return None

    def fetch(self, stored: StoredFile, target: Path) -> None:
        """Brings a file to this machine; the target is complete and has the right hash, or is not there.

        Args:
            stored: the file, as it was when it was stored.
            target: where; replaced if it is there.

        Raises:
            DiskFullError: there is no room.
            StorageError: the file is missing or not what was stored, or the target cannot be written.
        """
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
        digest = hashlib.sha256()
        try:
            with storage_errors(target.parent), partial.open("xb") as stream:
                for chunk in self.read(stored.key, 0, stored.size):
                    digest.update(chunk)
                    stream.write(chunk)
                stream.flush()
                os.fsync(stream.fileno())
            if digest.hexdigest() != stored.sha256:
                raise StorageError(f"artifact file {stored.key} is damaged in the store; restore it or make it anew")
            with storage_errors(target.parent):
                partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def new_key() -> str:
    """A key that no file has."""
    return secrets.token_hex(16)


def require_key(key: str) -> str:
    """The key, if it is one.

    Raises:
        StorageError: it is none, and must not become part of a path.
    """
    if not KEY.fullmatch(key):
        raise StorageError("a storage key is 32 hexadecimal digits; this one is not")
    return key


def require_regular(source: Path) -> None:
    """Lets only regular files become artifacts.

    Raises:
        StorageError: it is something else, or a link.
    """
    if source.is_symlink() or not source.is_file():
        raise StorageError(f"{source.name} is not a regular file; only regular files can be artifacts")


def capped(chunks: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """The chunks, unless there are too many.

    Raises:
        OverQuotaError: they are longer than `max_bytes` together.
    """
    total = 0
    for chunk in chunks:
        total += len(chunk)
        if total > max_bytes:
            raise OverQuotaError(
                f"the file is larger than the {max_bytes:,} bytes that one may have; send a smaller one"
            )
        yield chunk
