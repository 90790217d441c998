import fcntl
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import utils

from rocket_core.checkpoint import find_model
from rocket_core.errors import HubCacheBusyError, InsufficientDiskError
from rocket_core.hub import cache as hub_cache
from rocket_core.hub.repository import HubAccess
from tests.reference.fake_hub import COMMIT, FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

WEIGHTS = safetensors_bytes(llama_tensors())
CONFIG = b'{"model_type": "llama"}'
ONE = len(WEIGHTS) + len(CONFIG) + 2000
"""Bytes of a model in the cache, with the small files in which the Hub's client records commits."""
ROOT = Path(__file__).parents[3]
WITHIN = 60

# A separate process that finds a model as a job does, reports it, and runs until its input is closed.
JOB = """
import sys
from pathlib import Path
from rocket_core.checkpoint import find_model
from rocket_core.errors import RocketError
from rocket_core.hub.repository import HubAccess
for model in sys.argv[3:]:
    try:
        found = find_model(model, hub=HubAccess(cache=Path(sys.argv[1]), quota_bytes=int(sys.argv[2])))
        print("found", (found.folder / "model.safetensors").stat().st_size, flush=True)
    except RocketError as error:
        print(error.code, error.retryable, error, flush=True)
sys.stdin.read()
"""
# The same without a Hub and without importing heavy libraries: the files appear after a while.
COPY = """
import sys, time
from pathlib import Path
from rocket_core.hub import cache as hub_cache
from rocket_core.errors import RocketError
place, quota, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
hub_cache.hold(place)
try:
    here = (place / "blobs" / "x").exists()
    hub_cache.make_room(quota, hub_cache.Room(repository=place, commit="x", size=size, missing=0 if here else size))
    print("reserved", flush=True)
    if not here and len(sys.argv) == 4:
        time.sleep(0.3)
        (place / "blobs").mkdir(parents=True, exist_ok=True)
        (place / "blobs" / "x").write_bytes(bytes(size))
    print("found", flush=True)
except RocketError as error:
    print(error.code, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hub(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        for name in "abcdef":
            fake.repositories[f"org/{name}"] = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        yield fake
        utils.close_session()


@pytest.fixture
def cache(tmp_path):
    yield tmp_path / "cache"
    for repository in list(hub_cache._held):
        hub_cache.release(repository)


@pytest.fixture
def start(cache):
    """Start a program, which runs until it is ended."""
    running = []

    def start(code, *arguments, **environment):
        job = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(job)
        return job

    yield start
    for job in running:
        if not job.stdin.closed:
            end(job)
        job.stdout.close()


def answer(job):
    return job.stdout.readline().strip()


def end(job):
    job.stdin.close()
    job.wait(WITHIN)


def place(cache, name):
    return cache / f"models--org--{name}"


def models(cache):
    return {folder.name.rpartition("--")[2] for folder in cache.glob("models--*")}


def fetch(cache, name, quota=None):
    """Fetch a model like a job that has ended since."""
    found = find_model(f"org/{name}", hub=HubAccess(cache=cache, quota_bytes=quota))
    hub_cache.release(place(cache, name))
    return found


def age(cache, name, seconds):
    """Set back the time at which a model was used."""
    moment = time.time() - seconds
    os.utime(hub_cache._lock_file(place(cache, name)), (moment, moment))


def test_without_a_quota_nothing_is_removed_or_locked(hub, cache):
    fetch(cache, "a")
    fetch(cache, "b")
    assert models(cache) == {"a", "b"}
    assert not (cache / ".locks" / "rocket").exists()


def test_the_least_recently_used_model_makes_room(hub, cache):
    for seconds, name in ((300, "a"), (100, "b"), (200, "c")):
        fetch(cache, name, 3 * ONE)
        age(cache, name, seconds)
    fetch(cache, "d", 3 * ONE)
    assert models(cache) == {"b", "c", "d"}
    # Using it again counts.
    fetch(cache, "c", 3 * ONE)
    fetch(cache, "e", 2 * ONE)
    assert models(cache) == {"c", "e"}
    fetch(cache, "a", 10 * ONE)
    assert models(cache) == {"a", "c", "e"}


def test_a_removed_model_can_be_fetched_again(hub, cache):
    for name in "aba":
        found = fetch(cache, name, ONE)
        assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert models(cache) == {"a"}


def test_a_cached_model_needs_no_room(hub, cache):
    fetch(cache, "a", ONE)
    asked = len([path for path, _, part in hub.asked if path.endswith("model.safetensors") and part is None])
    assert fetch(cache, "a", 1).commit == COMMIT
    assert len([path for path, _, part in hub.asked if path.endswith("model.safetensors") and part is None]) == asked


def test_a_model_beyond_the_quota_is_refused_before_any_change(hub, cache):
    fetch(cache, "a", ONE)
    with pytest.raises(InsufficientDiskError, match=r"the model takes .* Hub cache .*whose quota.*ROCKET_HUB_CACHE"):
        fetch(cache, "b", len(WEIGHTS))
    assert models(cache) == {"a"}
    assert not [
        path for path, _, part in hub.asked if path.startswith("/org/b/resolve") and "safetensors" in path and not part
    ]


def test_a_model_in_use_by_another_process_is_kept(hub, start, cache):
    job = start(JOB, cache, ONE, "org/a", "org/a", HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    assert {answer(job), answer(job)} == {f"found {len(WEIGHTS)}"}
    with pytest.raises(HubCacheBusyError, match=r"more than running jobs leave of its quota.*ROCKET_HUB_CACHE_BYTES"):
        fetch(cache, "b", ONE)
    hub_cache.release(place(cache, "b"))
    assert models(cache) == {"a"}
    # However the process ends.
    job.kill()
    job.wait(WITHIN)
    fetch(cache, "b", ONE)
    assert models(cache) == {"b"}


def test_a_model_in_use_by_two_processes_is_kept_until_both_end(start, cache):
    first, second = (start(COPY, place(cache, "a"), 2 * ONE, ONE) for _ in range(2))
    assert [answer(job) for job in (first, second) for _ in range(2)] == ["reserved", "found"] * 2
    end(first)
    other = start(COPY, place(cache, "b"), ONE, ONE)
    assert answer(other) == "hub_cache_busy"
    end(other)
    end(second)
    assert answer(start(COPY, place(cache, "b"), ONE, ONE)) == "reserved"
    assert models(cache) <= {"b"}


def test_concurrent_workers_respect_quota_and_models_in_use(start, cache):
    """Eight processes use five models at once, with room for three: each finds its model or is told to try again."""
    names = "abcdeabc"
    jobs = [start(COPY, place(cache, name), 3 * ONE, ONE) for name in names]
    said = [answer(job) for job in jobs]
    assert set(said) == {"reserved", "hub_cache_busy"}
    admitted = {name for name, text in zip(names, said, strict=True) if text == "reserved"}
    assert len(admitted) == 3
    assert {answer(job) for job, text in zip(jobs, said, strict=True) if text == "reserved"} == {"found"}
    # All of them still run.
    assert {name for name in models(cache) if hub_cache._size(place(cache, name)) == ONE} == admitted
    assert sum(hub_cache._size(folder) for folder in cache.glob("models--*")) <= 3 * ONE


def test_a_running_download_counts_with_its_whole_size(hub, start, cache):
    """Another process has reserved room and not written anything yet."""
    other = start(COPY, place(cache, "z"), 2 * ONE, ONE, "writes nothing")
    assert answer(other) == "reserved"
    find_model("org/a", hub=HubAccess(cache=cache, quota_bytes=2 * ONE))
    with pytest.raises(HubCacheBusyError):
        find_model("org/b", hub=HubAccess(cache=cache, quota_bytes=2 * ONE))
    # A reservation ends with its process.
    end(other)
    find_model("org/b", hub=HubAccess(cache=cache, quota_bytes=2 * ONE))
    assert models(cache) == {"a", "b"}


def test_other_commits_of_the_same_model_are_removed_last(hub, cache):
    fetch(cache, "a", 3 * ONE)
    fetch(cache, "b", 3 * ONE)
    # As if it had been fetched at another commit, of which the configuration is still the same.
    snapshots = place(cache, "a") / "snapshots"
    (snapshots / COMMIT).rename(snapshots / ("0" * 40))
    for ref in (place(cache, "a") / "refs").rglob("*"):
        ref.write_text("0" * 40, encoding="utf-8")
    changed = bytearray(WEIGHTS)
    changed[-1] ^= 1
    hub.repositories["org/a"]["model.safetensors"] = bytes(changed)
    fetch(cache, "a", 3 * ONE)
    assert models(cache) == {"a", "b"}
    assert {folder.name for folder in snapshots.iterdir()} == {COMMIT, "0" * 40}
    # Room for this model at one commit only.
    (snapshots / COMMIT).rename(snapshots / ("1" * 40))
    found = fetch(cache, "a", ONE)
    assert models(cache) == {"a"}
    assert [folder.name for folder in snapshots.iterdir()] == [COMMIT]
    assert (found.folder / "model.safetensors").read_bytes() == changed
    assert hub_cache._size(place(cache, "a")) <= ONE + 100
    assert {file.read_text(encoding="utf-8") for file in (place(cache, "a") / "refs").rglob("*") if file.is_file()} <= {
        COMMIT
    }


def test_remains_of_a_killed_removal_are_removed_next_time(hub, cache):
    fetch(cache, "a", ONE)
    place(cache, "a").rename(cache / ".removed-models--org--a")
    fetch(cache, "b", ONE)
    assert not list(cache.glob(".removed-*"))


def test_a_damaged_lock_file_reserves_nothing(hub, cache):
    fetch(cache, "a", 2 * ONE)
    file = hub_cache._lock_file(place(cache, "a"))
    for text in ("{", "[]", '{"x": "y"}', json.dumps({"x": 10**18})):
        # No process holds the lock, so the last text belongs to a process that has ended.
        file.write_text(text, encoding="utf-8")
        fetch(cache, "b", 2 * ONE)
        assert models(cache) == {"a", "b"}


def test_other_files_and_data_sets_are_kept(hub, cache):
    (cache / "datasets--org--text" / "blobs").mkdir(parents=True)
    (cache / "datasets--org--text" / "blobs" / "x").write_bytes(bytes(ONE))
    (cache / "version.txt").write_text("1", encoding="utf-8")
    fetch(cache, "a", ONE)
    fetch(cache, "b", ONE)
    assert (cache / "datasets--org--text" / "blobs" / "x").exists()
    assert (cache / "version.txt").exists()
    assert models(cache) == {"b"}


def test_a_link_in_place_of_a_repository_is_not_followed(hub, cache, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(10 * ONE))
    cache.mkdir()
    place(cache, "linked").symlink_to(outside)
    fetch(cache, "a", ONE)
    fetch(cache, "b", ONE)
    assert (outside / "file").exists()


def test_holding_waits_for_a_removal(start, cache):
    """A process that decides what to remove prevents others from holding it."""
    lock = hub_cache._open(cache / ".locks" / "rocket" / "decision.lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
    other = start(COPY, place(cache, "b"), ONE, ONE)
    assert not select.select([other.stdout], [], [], 2)[0]
    os.close(lock)
    assert answer(other) == "reserved"


def test_a_busy_cache_is_retryable_and_a_too_small_one_is_not():
    assert HubCacheBusyError.retryable
    assert not InsufficientDiskError.retryable
