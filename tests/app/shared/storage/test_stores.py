"""Properties of every kind of store; `view` inspects it by other means."""

import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.shared.errors import OverQuotaError, StorageError
from app.shared.storage import StoredFile
from tests.worker.waiting import eventually

MIB = 2**20
# Longer than the parts in which it is sent to S3.
LONG = os.urandom(MIB) * 17 + b"end"
_STORE_UNTIL_KILLED = """
import sys, time
from app.shared.settings import load_settings
from app.shared.storage import open_store

def endless():
    for _ in range(24):
        yield bytes(2**20)
    print("under way", flush=True)
    time.sleep(600)

open_store(load_settings()).put_stream(endless(), max_bytes=2**30)
"""


def read(store, stored):
    return b"".join(store.read(stored.key, 0, stored.size))


def half_a_minute_ahead():
    return time.time() + 30


@pytest.mark.parametrize("content", [b"", b"x", LONG], ids=["empty", "short", "long"])
def test_stored_content_equals_its_source(store, view, source, content):
    stored = store.put(source(content))
    assert (stored.size, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert view.keys() == [stored.key]
    assert view.read(stored.key) == content
    assert read(store, stored) == content


@pytest.mark.parametrize(
    "chunks",
    [[], [b"a", b"", b"b"], [LONG], [LONG[start : start + 999_983] for start in range(0, len(LONG), 999_983)]],
    ids=["none", "tiny", "one", "odd"],
)
def test_a_stream_is_stored_whatever_its_chunks(store, view, chunks):
    content = b"".join(chunks)
    stored = store.put_stream(iter(chunks), max_bytes=len(content))
    assert (stored.size, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert view.read(stored.key) == content


@pytest.mark.parametrize("limit", [3, 16 * MIB])
def test_an_oversized_stream_leaves_nothing(store, view, limit):
    def endless():
        while True:
            yield bytes(MIB)

    with pytest.raises(OverQuotaError):
        store.put_stream(endless(), max_bytes=limit)
    assert view.keys() == []
    assert view.unfinished() == []


def test_an_interrupted_stream_leaves_nothing(store, view):
    class GoneError(Exception):
        pass

    def broken():
        yield from [bytes(MIB)] * 17
        raise GoneError

    with pytest.raises(GoneError):
        store.put_stream(broken(), max_bytes=2**30)
    assert view.keys() == []
    assert view.unfinished() == []


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, len(LONG)), (MIB - 1, MIB + 1), (len(LONG) - 1, len(LONG)), (5, 5), (2**18, 2**20)]
)
def test_a_range_returns_those_bytes(store, source, start, stop):
    stored = store.put(source(LONG))
    assert b"".join(store.read(stored.key, start, stop)) == LONG[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (2, 9), (3, 4), (7, 9)])
def test_a_range_beyond_the_file_is_an_error(store, source, start, stop):
    stored = store.put(source(b"abc"))
    with pytest.raises(StorageError):
        list(store.read(stored.key, start, stop))


def test_a_reader_may_stop_early(store, source):
    stored = store.put(source(LONG))
    pieces = store.read(stored.key, 0, stored.size)
    assert LONG.startswith(next(pieces))
    pieces.close()
    assert read(store, stored) == LONG


def test_concurrent_threads_may_store_and_read(store, view):
    def one(number):
        content = str(number).encode() * 1000
        return read(store, store.put_stream([content], max_bytes=10**6)) == content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))
    assert len(view.keys()) == 24


@pytest.mark.parametrize(
    "key",
    ["", "..", "../x", "/etc/passwd", "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 32 + "/..", "%2e%2e", "a#", "a\0"],
)
def test_only_a_valid_key_leads_to_a_file(store, key, tmp_path):
    target = tmp_path / "target"
    for action in (
        lambda: list(store.read(key, 0, 1)),
        lambda: store.remove(key),
        lambda: store.fetch(StoredFile(key=key, size=1, sha256="0" * 64), target),
    ):
        with pytest.raises(StorageError, match="32 hexadecimal"):
            action()


def test_removing_twice_is_not_an_error(store, view, source):
    stored = store.put(source(b"abc"))
    store.remove(stored.key)
    store.remove(stored.key)
    assert view.keys() == []
    with pytest.raises(StorageError, match=f"{stored.key} is missing"):
        read(store, stored)


@pytest.mark.parametrize("kind", ["link", "folder", "nothing"])
def test_only_regular_files_are_artifacts(store, source, tmp_path, kind):
    wrong = tmp_path / "wrong"
    if kind == "link":
        wrong.symlink_to(source(b"abc"))
    elif kind == "folder":
        wrong.mkdir()
    with pytest.raises(StorageError, match="not a regular file"):
        store.put(wrong)


def test_only_files_older_than_the_limit_are_listed(store, view, source):
    began = time.time() - 5
    stored = store.put(source(b"abc"))
    view.write("README", b"")
    assert store.keys(before=began) == []
    assert store.keys(before=half_a_minute_ahead()) == [stored.key]


def test_a_fetched_file_is_verified_and_replaces_the_target(store, source, tmp_path):
    target = tmp_path / "fetched"
    target.write_bytes(b"old")
    store.fetch(store.put(source(LONG)), target)
    assert target.read_bytes() == LONG


@pytest.mark.parametrize(
    "other", [bytes([LONG[0] ^ 1]) + LONG[1:], LONG[:-1], b""], ids=["flipped", "shorter", "empty"]
)
def test_corrupted_files_are_never_fetched(store, view, source, tmp_path, other):
    folder = tmp_path / "fetched"
    folder.mkdir()
    stored = store.put(source(LONG))
    view.write(stored.key, other)
    with pytest.raises(StorageError):
        store.fetch(stored, folder / "target")
    assert list(folder.iterdir()) == []


def test_a_store_belongs_to_the_first_database_that_asks(store, another_store, view):
    assert store.is_bound_to("one")
    assert not another_store().is_bound_to("two")
    assert another_store().is_bound_to("one")
    # The file that names the owner does not count as a stored file.
    assert store.keys(before=half_a_minute_ahead()) == []


def test_of_concurrent_databases_only_one_gets_the_store(another_store):
    stores = [another_store() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda pair: pair[1].is_bound_to(str(pair[0])), enumerate(stores)))
    assert sum(answers) == 1


def test_check_detects_whether_a_store_is_writable(store, view):
    store.check()
    assert view.keys() == []
    assert view.unfinished() == []
    view.break_down()
    with pytest.raises(StorageError):
        store.check()


def test_a_killed_upload_leaves_only_what_the_sweep_removes(store, view):
    environment = os.environ | {f"ROCKET_{name.upper()}": value for name, value in view.settings.items()}
    command = [sys.executable, "-c", _STORE_UNTIL_KILLED]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"under way\n"
        try:
            eventually(view.has_begun)
        finally:
            process.kill()
    assert len(view.unfinished()) == 1
    assert view.keys() == []
    assert store.keys(before=half_a_minute_ahead()) == []
    # Recent additions may still be in progress.
    assert store.remove_unfinished(before=time.time() - 60) == 0
    assert len(view.unfinished()) == 1
    assert store.remove_unfinished(before=half_a_minute_ahead()) == 1
    assert view.unfinished() == []
