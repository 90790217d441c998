"""Cache of profiles that outlive their run, so that another ratio does not need a second calibration.

The results of a run that do not depend on its ratio (calibration inputs, sensitivities, layer profiles, eigenbases and
Gram matrices) are stored under the hash of what they depend on. A later run takes them over into its own work folder
and continues as if it had been stopped after profiling, with a byte-identical result.

Files are shared by hard links, so that taking over costs nothing and removing a cached profile affects no run; on file
systems without hard links they are copied. A cached profile appears and disappears by a single rename, so that no lock
is needed.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.config import SETTINGS_NOT_IN_PROFILE, CompressionConfig
from rocket_core.errors import CorruptCheckpointError
from rocket_core.methods import Method
from rocket_core.pipeline.state.files import read_model, read_tensors, write_model
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.schema import FrozenModel

# In the order in which they are taken over: a block's record means that the rest of the block is complete.
_SMALL = ("inputs.safetensors", "sensitivities", "energies", "profiles", "blocks")
_STATISTICS = ("bases", "grams")
_RECORD = "profile.json"
# Prefix of profiles being written or removed, which are never read.
_TEMPORARY = "passing-"
_TEMPORARY_SECONDS = 24 * 3600


class ProfileRecord(FrozenModel):
    """Identity and content of a cached profile."""

    identity: RunIdentity
    """identity of the run, without the settings that a profile does not depend on."""
    sizes: dict[str, int]
    """bytes of each file, by its path in the folder."""


def profile_identity(identity: RunIdentity, method: Method) -> RunIdentity:
    """Return the identity of a run's profile: the same for runs that differ only in what follows profiling.

    Args:
        identity: identity of the run.
        method: its method; a uniform method profiles all layers only at the run's ratio.
    """
    left_out = SETTINGS_NOT_IN_PROFILE - ({"ratio"} if method.uniform else set())
    settings = {name: value for name, value in identity.settings.items() if name not in left_out}
    return identity.model_copy(update={"settings": settings})


class ProfileCache:
    """A folder of cached profiles.

    Args:
        folder: the folder; created when the first profile is stored.
        quota_bytes: disk space for all of them. The least recently used one is removed first; of a profile that is
            too large by itself, only the layer profiles are stored, and as many statistics as fit.
    """

    def __init__(self, folder: Path, *, quota_bytes: int = CompressionConfig(ratio=0).statistics_quota_bytes) -> None:
        self.folder = folder
        self._quota = quota_bytes

    def inputs(self, identity: RunIdentity) -> CalibrationInputs | None:
        """Return the calibration inputs of a cached profile, if it exists.

        Args:
            identity: see `profile_identity`.
        """
        entry = self._find(identity)
        if entry is None:
            return None
        try:
            return CalibrationInputs(tensors=read_tensors(entry / "inputs.safetensors"))
        except (OSError, CorruptCheckpointError):
            return None

    def restore_into(self, identity: RunIdentity, work: WorkFolder) -> bool:
        """Link a cached profile into a work folder, and return whether it existed.

        Args:
            identity: see `profile_identity`.
            work: the claimed work folder, with the same inputs.
        """
        entry = self._find(identity)
        if entry is None:
            return False
        try:
            for file in _files(entry, (*_STATISTICS, *_SMALL)):
                _link(file, work.path / file.relative_to(entry))
            _mark_used(entry)
        except FileNotFoundError:
            # Removed meanwhile. The files copied so far are complete; the run computes the rest.
            return False
        return True

    def store(self, identity: RunIdentity, work: WorkFolder) -> None:
        """Store the profile of a run, unless it is cached already.

        Args:
            identity: see `profile_identity`.
            work: a work folder in which all layers are profiled.
        """
        if self._find(identity) is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        sizes: dict[str, int] = {}
        try:
            for file in _files(work.path, (*_SMALL, *_STATISTICS)):
                name, size = file.relative_to(work.path), file.stat().st_size
                if name.parts[0] in _STATISTICS and sum(sizes.values()) + size > self._quota:
                    continue
                _link(file, unfinished / name)
                sizes[name.as_posix()] = size
            write_model(unfinished / _RECORD, ProfileRecord(identity=identity, sizes=sizes))
            self._make_room(sum(sizes.values()))
            # Another run may have stored the same one meanwhile.
            with suppress(OSError):
                unfinished.rename(self._entry(identity))
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def evict_oldest(self) -> bool:
        """Remove the least recently used profile, to free disk for a run; return False if the cache is empty."""
        entries = self._entries()
        if entries:
            self._remove(entries[0][1])
        return bool(entries)

    def _make_room(self, needed: int) -> None:
        """Remove leftovers of crashes, and least recently used profiles until the bytes needed fit the quota."""
        for entry in self.folder.iterdir():
            with suppress(OSError):
                if entry.name.startswith(_TEMPORARY) and entry.stat().st_mtime < time.time() - _TEMPORARY_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)
        entries = self._entries()
        total = sum(size for size, _ in entries)
        for size, entry in entries:
            if total + needed <= self._quota:
                break
            self._remove(entry)
            total -= size

    def _entries(self) -> list[tuple[int, Path]]:
        """Return the size and path of each profile, least recently used first."""
        entries = []
        for entry in self.folder.glob("[!.]*"):
            # Other processes may add and remove profiles meanwhile.
            with suppress(OSError):
                if not entry.name.startswith(_TEMPORARY):
                    entries.append((entry.stat().st_mtime, _bytes_of(entry), entry))
        return [(size, entry) for _, size, entry in sorted(entries)]

    def _find(self, identity: RunIdentity) -> Path | None:
        entry = self._entry(identity)
        if not entry.is_dir():
            return None
        try:
            record = read_model(entry / _RECORD, ProfileRecord)
            complete = all((entry / name).stat().st_size == size for name, size in record.sizes.items())
        except (FileNotFoundError, CorruptCheckpointError):
            record, complete = None, False
        if record is None or not complete or record.identity != identity:
            self._remove(entry)
            return None
        return entry

    def _remove(self, entry: Path) -> None:
        discarded = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            entry.rename(discarded)
            shutil.rmtree(discarded, ignore_errors=True)

    def _entry(self, identity: RunIdentity) -> Path:
        return self.folder / identity.fingerprint


def _files(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = folder / name
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        # Skip what a killed process was writing.
        yield from (file for file in files if file.suffix in {".safetensors", ".json"})


def _link(file: Path, target: Path) -> None:
    """Link or copy a finished file, which is never modified."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.unlink(missing_ok=True)
        target.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, or one without hard links. An interrupted copy must not look complete.
        copy = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        shutil.copyfile(file, copy)
        copy.replace(target)


def _mark_used(folder: Path) -> None:
    # By a descriptor: a confined process cannot set the times of a path.
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
