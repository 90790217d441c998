"""The data folder of one machine: its database, its lock, and its work folders."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from app.shared.errors import DataFolderLockedError, StorageError
from app.shared.storage.store import KEY, storage_errors
from rocket_core.system.files import lock, locked

_OWNER = "database"


class WorkFolders:
    """One folder per job for checkpoints and unfinished exports.

    Args:
        folder: the parent folder; created if needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with storage_errors(folder):
            # Models may be private. The mode of an existing folder is left as it is.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Return the folder of a key, created if needed.

        Raises:
            StorageError: it cannot be created.
        """
        folder = self._locate(key)
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def remove(self, key: str) -> None:
        """Remove a folder with its content; no-op if it does not exist.

        Raises:
            StorageError: it cannot be removed.
        """
        folder = self._locate(key)
        with storage_errors(folder), suppress(FileNotFoundError):
            shutil.rmtree(folder)

    def keys(self, *, before: float) -> list[str]:
        """Return the folders last changed before a time, in seconds since the epoch."""
        with storage_errors(self._folder):
            return old_entries(self._folder, before=before)

    def _locate(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise StorageError("not a work key; expected 32 hexadecimal digits")
        return self._folder / key


def old_entries(folder: Path, *, before: float, suffix: str = "") -> list[str]:
    """Return the entries named by a key and a suffix that were last changed before a time, sorted.

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
    """Return whether the files below a folder belong to a database; the first one to ask becomes their owner.

    To another database, for instance an empty one, all of them would look like orphans.

    Args:
        folder: a data folder, or that of a local store.
        database: the database's unique id.

    Raises:
        StorageError: the folder cannot be used.
    """
    with storage_errors(folder), (folder / _OWNER).open("a+", encoding="utf-8") as stream:
        # Several machines may share the folder; one that dies at this point leaves an empty file, which has no owner.
        lock(stream.fileno(), wait=True)
        stream.seek(0)
        owner = stream.read()
        if not owner:
            stream.write(database)
            stream.flush()
            os.fsync(stream.fileno())
        return (owner or database) == database


@contextmanager
def data_folder_lock(data_dir: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock on the data folder for one service; the OS releases it when the process dies, in whatever way.

    Args:
        data_dir: the folder.
        shared: share the lock with other shared holders; excludes only exclusive ones.

    Raises:
        DataFolderLockedError: another service holds it.
        StorageError: the folder cannot be written.
    """
    with ExitStack() as stack:
        with storage_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            try:
                # Not inheritable, so that a job that outlives the service does not keep the folder locked.
                stack.enter_context(locked(data_dir / "lock", shared=shared))
            except BlockingIOError:
                raise DataFolderLockedError(
                    f"another service uses {data_dir}; stop it, or choose another folder (--data-dir, ROCKET_DATA_DIR)"
                ) from None
        yield
