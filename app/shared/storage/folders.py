"""The data folder of one machine: whose it is, who uses it, and its work folders."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.shared.errors import DataFolderLockedError, StorageError
from app.shared.storage.faults import storage_errors
from app.shared.storage.store import KEY

_OWNER = "database"


class WorkFolders:
    """One folder per job for checkpoints and exports in the making.

    Args:
        folder: where; created if need be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with storage_errors(folder):
            # Models may be private. One that is there already stays as its owner has made it.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """The folder of a key, created if need be.

        Raises:
            StorageError: it cannot be created.
        """
        folder = self._locate(key)
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def remove(self, key: str) -> None:
        """Removes a folder with all it holds; one that is gone already is no error.

        Raises:
            StorageError: it cannot be removed.
        """
        folder = self._locate(key)
        with storage_errors(folder), suppress(FileNotFoundError):
            shutil.rmtree(folder)

    def keys(self, *, before: float) -> list[str]:
        """Folders last changed before a time, in seconds since the epoch."""
        with storage_errors(self._folder):
            return old_entries(self._folder, before=before)

    def _locate(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise StorageError("a work key is 32 hexadecimal digits; this one is not")
        return self._folder / key


def old_entries(folder: Path, *, before: float, suffix: str = "") -> list[str]:
    """Entries of a folder that are named by a key and a suffix and were last changed before a time, sorted.

    Raises:
        OSError: the folder cannot be read.
    """
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            is_ours = entry.name.endswith(suffix) and KEY.fullmatch(entry.name.removesuffix(suffix))
            with suppress(FileNotFoundError):
                if is_ours and entry.stat(follow_symlinks=False).st_ctime < before:
                    names.append(entry.name)
    return sorted(names)


def is_bound_to(folder: Path, database: str) -> bool:
    """Whether the files below a folder are those of a database; the first one to ask makes them its own.

    To another database, an empty one for instance, all of them look as if they belonged to nothing.

    Args:
        folder: a data folder, or that of a local store.
        database: what tells the database from all others.

    Raises:
        StorageError: the folder cannot be used.
    """
    with storage_errors(folder), (folder / _OWNER).open("a+", encoding="utf-8") as stream:
        # Several machines may share the folder, and one that dies in here leaves an empty file, which is nobody's.
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        owner = stream.read()
        if not owner:
            stream.write(database)
            stream.flush()
            os.fsync(stream.fileno())
        return (owner or database) == database


@contextmanager
def data_folder_lock(data_dir: Path, *, shared: bool = False) -> Iterator[None]:
    """Holds the data folder for one service; the system lets go of it when the process dies, however it dies.

    Args:
        data_dir: the folder.
        shared: hold it with others that share it, and keep out only who wants it alone.

    Raises:
        DataFolderLockedError: another service holds it.
        StorageError: the folder cannot be written.
    """
    path = data_dir / "lock"
    with storage_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        # Not inheritable, so that a job that outlives the service does not keep the folder locked.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataFolderLockedError(
                f"another service uses {data_dir}; stop it, or choose another folder (--data-dir, ROCKET_DATA_DIR)"
            ) from None
        yield
    finally:
        os.close(descriptor)
