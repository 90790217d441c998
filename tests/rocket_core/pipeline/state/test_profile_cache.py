"""A cached profile, which saves later runs the calibration and changes no byte of their output."""

import errno
import json
import os
import shutil

import pytest

from rocket_core.checkpoint import ModelSource
from rocket_core.errors import InsufficientDiskError
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run, run_identity
from rocket_core.pipeline.state.profile_cache import profile_identity
from tests.sampling import sweep

FAST = {"preset": "fast", "sensitivity_samples": 4, "export": ("rocket",), "cap_slack": 0.01}


@pytest.fixture
def passes(monkeypatch):
    """Record which blocks were calibrated, in order."""
    calibrated = []
    statistics = BlockWalk.statistics

    def note(self, index, *args, **kwargs):
        calibrated.append(index)
        return statistics(self, index, *args, **kwargs)

    monkeypatch.setattr(BlockWalk, "statistics", note)
    return calibrated


@pytest.fixture(scope="module")
def made(tmp_path_factory, model_folder, settings, fingerprint):
    """Return a folder with the profile of a run, and the fingerprint of a run at another ratio without it."""
    folder = tmp_path_factory.mktemp("kept")
    model = str(model_folder("llama"))
    compress(model, folder / "out", settings(**FAST), profiles=ProfileCache(folder / "profiles"))
    compress(model, folder / "alone", settings(**FAST, ratio=0.45))
    return folder / "profiles", fingerprint(folder / "alone")


@pytest.fixture
def profiles(made, tmp_path):
    """Return a copy of that folder."""
    return shutil.copytree(made[0], tmp_path / "profiles")


@pytest.fixture
def alone(made):
    """Return the fingerprint of that run."""
    return made[1]


@pytest.fixture
def run(tmp_path, model_folder, settings):
    """Compress a tiny model into a new folder."""
    count = iter(range(100))

    def make(profiles=None, family="llama", **changes):
        output = tmp_path / f"out{next(count)}"
        return output, compress(str(model_folder(family)), output, settings(**FAST | changes), profiles=profiles)

    return make


@pytest.mark.parametrize("preset", sweep(["fast"], soak=["paper", "best"]))
def test_another_ratio_reuses_the_profile_with_identical_bytes(run, tmp_path, fingerprint, passes, preset):
    profile_cache = ProfileCache(tmp_path / "profiles")
    run(profile_cache, preset=preset, ratio=0.3)
    passes.clear()
    output, report = run(profile_cache, preset=preset, ratio=0.45)
    assert passes == []
    alone, without = run(preset=preset, ratio=0.45)
    assert passes != []
    assert fingerprint(output) == fingerprint(alone)
    assert report.layers == without.layers
    assert report.allocation == without.allocation
    assert report.calibration == without.calibration
    assert {stage.name for stage in report.stages} == {stage.name for stage in without.stages}
    assert not list(output.glob(".rocket-work"))
    assert len(list((tmp_path / "profiles").iterdir())) == 1


@pytest.fixture
def identity(model_folder, settings):
    """Return the identity of a run's profile."""

    def of(family="llama", **changes):
        source = ModelSource(folder=model_folder(family), name="model", commit=None)
        prepared = prepare_run(source, settings(**FAST | changes))
        return profile_identity(run_identity(prepared), prepared.method)

    return of


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 11},
        {"seed": 1},
        {"sequence_length": 16},
        {"kinds": ("sparse",)},
        {"shrinkage": 0.1},
        {"ignore": ("*.down_proj",)},
        {"budget": "bytes"},
        {"dtype": "bfloat16"},
        {"sequential": True},
        {"sensitivity_samples": 5},
        {"family": "mistral"},
    ],
)
def test_the_identity_includes_what_affects_a_profile(identity, settings, changes):
    calibration = settings().calibration.model_dump()
    if set(changes) <= set(calibration):
        changes = {"calibration": calibration | changes}
    assert identity(**changes) != identity()


@pytest.mark.parametrize(
    "changes", [{"ratio": 0.45}, {"cap_slack": 0.5}, {"export": ("dense",)}, {"max_shard_bytes": 9}, {"evaluate": {}}]
)
def test_the_identity_excludes_what_does_not_affect_a_profile(identity, changes):
    assert identity(**changes) == identity()


def test_a_default_length_makes_no_second_profile(identity, settings):
    calibration = settings().calibration.model_dump()
    explicit = identity(calibration=calibration | {"sequence_length": 64})
    assert explicit == identity(calibration=calibration | {"sequence_length": None})


def test_a_single_ratio_profile_is_not_reused_for_another_ratio(identity):
    wanda = {"method": "wanda", "preset": "paper"}
    assert identity(**wanda, export=("dense",)) == identity(**wanda)
    assert identity(**wanda, ratio=0.45) != identity(**wanda)


def test_the_least_recently_used_profile_makes_room(run, tmp_path, passes):
    folder = tmp_path / "profiles"
    run(ProfileCache(folder), family="llama")
    [first] = folder.iterdir()
    size = sum(file.stat().st_size for file in first.rglob("*") if file.is_file())
    profile_cache = ProfileCache(folder, quota_bytes=round(2.5 * size))
    run(profile_cache, family="llama", calibration={"dataset": "builtin", "samples": 12, "sequence_length": 32})
    [second] = set(folder.iterdir()) - {first}
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    # Using it makes it the most recent.
    run(profile_cache, ratio=0.4)
    run(profile_cache, shrinkage=0.1)
    left = set(folder.iterdir())
    assert len(left) == 2
    assert first in left
    assert second not in left


def test_statistics_beyond_the_quota_are_collected_again(run, tmp_path, fingerprint, alone, passes):
    profile_cache = ProfileCache(tmp_path / "none", quota_bytes=0)
    run(profile_cache)
    passes.clear()
    output, _ = run(profile_cache, ratio=0.45)
    # Once for the factors, but not for profiles.
    assert passes
    assert passes == sorted(set(passes))
    assert fingerprint(output) == alone


@pytest.mark.parametrize("harm", sweep(["cut"], soak=["lost", "record"]))
def test_a_damaged_profile_is_recreated(run, profiles, fingerprint, alone, harm):
    [place] = profiles.iterdir()
    if harm == "record":
        (place / "profile.json").write_text("{")
    else:
        file = sorted((place / "grams").iterdir())[0]
        data = file.read_bytes()
        file.unlink()
        if harm == "cut":
            file.write_bytes(data[:100])
    output, _ = run(ProfileCache(profiles), ratio=0.45)
    assert fingerprint(output) == alone
    [place] = profiles.iterdir()
    sizes = json.loads((place / "profile.json").read_text())["sizes"]
    assert sizes
    assert all((place / name).stat().st_size == size for name, size in sizes.items())


def test_a_profile_removed_during_reuse_is_recreated(run, profiles, fingerprint, alone, monkeypatch):
    [place] = profiles.iterdir()
    hardlink = type(place).hardlink_to
    taken = []

    def vanish(self, file):
        if len(taken) == 9:
            shutil.rmtree(place)
        taken.append(file)
        hardlink(self, file)

    monkeypatch.setattr(type(place), "hardlink_to", vanish)
    output, _ = run(ProfileCache(profiles), ratio=0.45)
    assert len(taken) > 9
    assert fingerprint(output) == alone


def test_without_hard_links_files_are_copied(run, profiles, fingerprint, alone, passes, monkeypatch):
    def refuse(self, file):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(type(profiles), "hardlink_to", refuse)
    output, _ = run(ProfileCache(profiles), ratio=0.45)
    assert passes == []
    assert fingerprint(output) == alone


def test_profiles_are_removed_if_a_run_needs_the_disk(run, profiles, alone, fingerprint, monkeypatch):
    asked = []

    def free_disk(_folder):
        asked.append(len(list(profiles.iterdir())))
        return 0 if asked[-1] else 2**40

    monkeypatch.setattr("rocket_core.pipeline.requirements.free_disk", free_disk)
    output, _ = run(ProfileCache(profiles), ratio=0.45)
    assert asked[:2] == [1, 0]
    assert fingerprint(output) == alone
    monkeypatch.setattr("rocket_core.pipeline.requirements.free_disk", lambda _folder: 0)
    with pytest.raises(InsufficientDiskError):
        run(ProfileCache(profiles), ratio=0.4)
    assert list(profiles.iterdir()) == []


def test_remains_of_crashes_are_removed_in_time(run, tmp_path):
    folder = tmp_path / "profiles"
    for name in ("passing-old", "passing-new"):
        (folder / name).mkdir(parents=True)
    os.utime(folder / "passing-old", (1, 1))
    run(ProfileCache(folder))
    assert not (folder / "passing-old").exists()
    assert (folder / "passing-new").exists()
