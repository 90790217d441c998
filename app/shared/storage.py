"""Files of the service, below one data folder.

<data-dir>/
├── rocket.sqlite3            the database, unless it is elsewhere
├── lock                      held by the running service
├── database                  names the database whose files these are
├── artifacts/<key>           one file per artifact, never altered
└── work/<key>/               a job's checkpoints and exports in the making

Keys are 32 random hexadecimal digits. Names that a user chose are looked up in the database and never become a path.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from app.shared.errors import DataFolderLockedError, DiskFullError, StorageError

_KEY = re.compile(r"[0-9a-f]{32}")
_CHUNK = 2**20
_TEMPORARY = ".tmp"


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


class ArtifactStore:
    """Artifacts in a local folder.

    Args:
        folder: where; created if need be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, source: Path) -> StoredFile:
        """Stores a file that nobody writes to any more; where the file system can, without a second copy.

        It appears under its key complete and durable, or not at all.

        Raises:
            DiskFullError: there is no room.
            StorageError: it cannot be read or stored.
        """
        if source.is_symlink() or not source.is_file():
            raise StorageError(f"{source.name} is no regular file; only those can be artifacts")
        key = secrets.token_hex(16)
        temporary = self._folder / (key + _TEMPORARY)
        try:
            with _storage_errors(self._folder):
                _link_or_copy(source, temporary)
                with temporary.open("rb") as stream:
                    digest, size = _hash(stream)
                    os.fsync(stream.fileno())
                temporary.replace(self._folder / key)
                _sync_folder(self._folder)
        finally:
            temporary.unlink(missing_ok=True)
        return StoredFile(key=key, size=size, sha256=digest)

    def path(self, key: str) -> Path:
        """Where a stored file lies.

        Raises:
            StorageError: there is no such file.
        """
        path = self._locate(key)
        if path.is_symlink() or not path.is_file():
            raise StorageError(f"artifact file {key} is missing from {self._folder}; restore it or retry the job")
        return path

    def remove(self, key: str) -> None:
        """Removes a file; one that is gone already is no error.

        Raises:
            StorageError: it cannot be removed.
        """
        with _storage_errors(self._folder):
            self._locate(key).unlink(missing_ok=True)

    def keys(self, *, before: float) -> list[str]:
        """Files that were stored before a time, those that a crash left half-written included.

        Args:
            before: seconds since the epoch; younger files may await the row that will name them.
        """
        return _names(self._folder, before)

    def _locate(self, key: str) -> Path:
        if not _KEY.fullmatch(key.removesuffix(_TEMPORARY)):
            raise StorageError("a storage key is 32 hexadecimal digits; this one is not")
        return self._folder / key


class WorkFolders:
    """One folder per job for checkpoints and exports in the making.

    Args:
        folder: where; created if need be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """The folder of a key, created if need be.

        Raises:
            StorageError: it cannot be created.
        """
        folder = self._locate(key)
        with _storage_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def remove(self, key: str) -> None:
        """Removes a folder with all it holds; one that is gone already is no error.

        Raises:
            StorageError: it cannot be removed.
        """
        folder = self._locate(key)
        with _storage_errors(folder), suppress(FileNotFoundError):
            shutil.rmtree(folder)

    def keys(self, *, before: float) -> list[str]:
        """Folders last changed before a time, in seconds since the epoch."""
        return _names(self._folder, before)

    def _locate(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise StorageError("a work key is 32 hexadecimal digits; this one is not")
        return self._folder / key


def is_bound_to(data_dir: Path, database: str) -> bool:
    """Whether the files below a data folder are those of a database; the first one to ask makes them its own.

    To another database, an empty one for instance, all of them look as if they belonged to nothing.

    Raises:
        StorageError: the folder cannot be used.
    """
    path = data_dir / "database"
    with _storage_errors(data_dir):
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as stream:
            stream.write(database)
        return path.read_text(encoding="utf-8") == database


@contextmanager
def data_folder_lock(data_dir: Path) -> Iterator[None]:
    """Holds the data folder for one service; the system lets go of it when the process dies, however it dies.

    Raises:
        DataFolderLockedError: another service holds it.
        StorageError: the folder cannot be written.
    """
    path = data_dir / "lock"
    with _storage_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        # Not inheritable, so that a job that outlives the service does not keep the folder locked.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataFolderLockedError(
                f"another service uses {data_dir}; stop it, or choose another folder with --data-dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}:
            raise
        shutil.copyfile(source, target, follow_symlinks=False)


def _hash(stream: BinaryIO) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path, before: float) -> list[str]:
    names = []
    with _storage_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            known = _KEY.fullmatch(entry.name.removesuffix(_TEMPORARY))
            with suppress(FileNotFoundError):
                if known and entry.stat(follow_symlinks=False).st_ctime < before:
                    names.append(entry.name)
    return sorted(names)


@contextmanager
def _storage_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFullError(f"no room left in {place}; free some and retry") from error
        raise StorageError(f"cannot use {place}: {error.strerror or error}") from error
