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

from rocket_core.calibration.inputs import CalibrationInputs
from rocket_core.config import BEHIND_THE_PROFILE, CompressionConfig
from rocket_core.errors import CorruptCheckpointError
from rocket_core.methods import Method
from rocket_core.pipeline.state.files import read_model, read_tensors, write_model
from rocket_core.pipeline.state.work_folder import RunIdentity, WorkFolder
from rocket_core.schema import FrozenModel

# In the order in which they are taken over: a block's record means that the rest of the block is complete.
_SMALL = ("inputs.safetensors", "sensitivities", "energies", "profiles", "blocks")
_STATISTICS = ("bases", "grams")
_RECORD = "profile.json"
# Prefix of profiles being written or removed, which are never read.
_PASSING = "passing-"
_SECONDS_OF_PASSING = 24 * 3600


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
    left_out = BEHIND_THE_PROFILE - ({"ratio"} if method.uniform else set())
    settings = {name: value for name, value in identity.settings.items() if name not in left_out}
    return identity.model_copy(update={"settings": settings})


class KeptProfiles:
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
        place = self._find(identity)
        if place is None:
            return None
        try:
            return CalibrationInputs(tensors=read_tensors(place / "inputs.safetensors"))
        except (OSError, CorruptCheckpointError):
            return None

    def lend(self, identity: RunIdentity, work: WorkFolder) -> bool:
        """Copy a cached profile into a work folder, and return whether it existed.

        Args:
            identity: see `profile_identity`.
            work: the claimed work folder, with the same inputs.
        """
        place = self._find(identity)
        if place is None:
            return False
        try:
            for file in _files(place, (*_STATISTICS, *_SMALL)):
                _share(file, work.path / file.relative_to(place))
            os.utime(place)
        except FileNotFoundError:
            # Removed meanwhile. The files copied so far are complete; the run computes the rest.
            return False
        return True

    def keep(self, identity: RunIdentity, work: WorkFolder) -> None:
        """Store the profile of a run, unless it is cached already.

        Args:
            identity: see `profile_identity`.
            work: a work folder in which all layers are profiled.
        """
        if self._find(identity) is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        making = self.folder / f"{_PASSING}{uuid.uuid4().hex}"
        sizes: dict[str, int] = {}
        try:
            for file in _files(work.path, (*_SMALL, *_STATISTICS)):
                name, size = file.relative_to(work.path), file.stat().st_size
                if name.parts[0] in _STATISTICS and sum(sizes.values()) + size > self._quota:
                    continue
                _share(file, making / name)
                sizes[name.as_posix()] = size
            write_model(making / _RECORD, ProfileRecord(identity=identity, sizes=sizes))
            self._make_room(sum(sizes.values()))
            # Another run may have stored the same one meanwhile.
            with suppress(OSError):
                making.rename(self._place(identity))
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def drop_oldest(self) -> bool:
        """Remove the least recently used profile, to free disk for a run; return False if the cache is empty."""
        kept = self._kept()
        if kept:
            self._remove(kept[0][1])
        return bool(kept)

    def _make_room(self, wanted: int) -> None:
        """Remove leftovers of crashes, and least recently used profiles until the wanted bytes fit the quota."""
        for place in self.folder.iterdir():
            with suppress(OSError):
                if place.name.startswith(_PASSING) and place.stat().st_mtime < time.time() - _SECONDS_OF_PASSING:
                    shutil.rmtree(place, ignore_errors=True)
        kept = self._kept()
        held = sum(size for size, _ in kept)
        for size, place in kept:
            if held + wanted <= self._quota:
                break
            self._remove(place)
            held -= size

    def _kept(self) -> list[tuple[int, Path]]:
        """Return the size and path of each profile, least recently used first."""
        found = []
        for place in self.folder.glob("[!.]*"):
            # Other processes may add and remove profiles meanwhile.
            with suppress(OSError):
                if not place.name.startswith(_PASSING):
                    found.append((place.stat().st_mtime, _disk(place), place))
        return [(size, place) for _, size, place in sorted(found)]

    def _find(self, identity: RunIdentity) -> Path | None:
        place = self._place(identity)
        if not place.is_dir():
            return None
        try:
            record = read_model(place / _RECORD, ProfileRecord)
            whole = all((place / name).stat().st_size == size for name, size in record.sizes.items())
        except (FileNotFoundError, CorruptCheckpointError):
            record, whole = None, False
        if record is None or not whole or record.identity != identity:
            self._remove(place)
            return None
        return place

    def _remove(self, place: Path) -> None:
        leaving = self.folder / f"{_PASSING}{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            place.rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)

    def _place(self, identity: RunIdentity) -> Path:
        return self.folder / identity.fingerprint


def _files(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        place = folder / name
        found = sorted(place.iterdir()) if place.is_dir() else [place]
        # Skip what a killed process was writing.
        yield from (file for file in found if file.suffix in {".safetensors", ".json"})


def _share(file: Path, place: Path) -> None:
    """Link or copy a finished file, which is never modified, to another place."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.unlink(missing_ok=True)
        place.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, or one without hard links. An interrupted copy must not look complete.
        copy = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
        shutil.copyfile(file, copy)
        copy.replace(place)


def _disk(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
