import hashlib
import os
import subprocess
import sys
import time

import pytest

from app.shared import storage
from app.shared.errors import DataFolderLockedError, DiskFullError, StorageError
from app.shared.storage import ArtifactStore, WorkFolders, data_folder_lock


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(3 * 2**20 + 1))
    return file


def test_what_is_stored_is_what_was_given(store, source):
    stored = store.put(source)
    assert store.path(stored.key).read_bytes() == source.read_bytes()
    assert stored.size == source.stat().st_size
    assert stored.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()


def test_storing_takes_no_second_copy_and_survives_the_source(store, source):
    content = source.read_bytes()
    stored = store.put(source)
    assert store.path(stored.key).samefile(source)
    source.unlink()
    assert store.path(stored.key).read_bytes() == content


def test_where_links_are_impossible_the_file_is_copied(store, source, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    stored = store.put(source)
    assert not store.path(stored.key).samefile(source)
    assert store.path(stored.key).read_bytes() == source.read_bytes()


def test_a_full_disk_leaves_nothing_half_written(store, source, monkeypatch, tmp_path):
    def refuse(*_arguments, **_options):
        raise OSError(18, "Invalid cross-device link")

    def fill(_source, target, **_options):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(storage.shutil, "copyfile", fill)
    with pytest.raises(DiskFullError):
        store.put(source)
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_a_link_is_no_artifact(store, source, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(StorageError):
        store.put(link)


@pytest.mark.parametrize(
    "key", ["", "..", "../x", "/etc/passwd", "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 32 + "/.."]
)
def test_only_a_key_leads_to_a_file(store, key):
    for action in (store.path, store.remove, WorkFolders(store._folder).path, WorkFolders(store._folder).remove):
        with pytest.raises(StorageError):
            action(key)


def test_a_link_put_in_place_of_a_file_is_not_followed(store, source, tmp_path):
    stored = store.put(source)
    store.path(stored.key).unlink()
    (tmp_path / "artifacts" / stored.key).symlink_to("/etc/passwd")
    with pytest.raises(StorageError):
        store.path(stored.key)


def test_removing_twice_is_no_error(store, source):
    stored = store.put(source)
    store.remove(stored.key)
    store.remove(stored.key)
    with pytest.raises(StorageError):
        store.path(stored.key)


def test_only_files_older_than_asked_are_listed(store, source, tmp_path):
    began = time.time() - 1
    stored = store.put(source)
    half = "b" * 32 + ".tmp"
    (tmp_path / "artifacts" / half).touch()
    (tmp_path / "artifacts" / "README").touch()
    assert store.keys(before=began) == []
    assert set(store.keys(before=time.time() + 1)) == {stored.key, half}
    store.remove(half)
    assert store.keys(before=time.time() + 1) == [stored.key]


def test_work_folders_come_and_go(tmp_path):
    folders = WorkFolders(tmp_path / "work")
    folder = folders.path("c" * 32)
    (folder / "deep").mkdir()
    (folder / "deep" / "file").touch()
    assert folders.path("c" * 32) == folder
    assert folders.keys(before=time.time() + 1) == ["c" * 32]
    folders.remove("c" * 32)
    folders.remove("c" * 32)
    assert not folder.exists()


def test_a_data_folder_has_one_service_at_a_time(tmp_path):
    second = data_folder_lock(tmp_path / "data")
    with data_folder_lock(tmp_path / "data"), pytest.raises(DataFolderLockedError), second:
        pass
    with data_folder_lock(tmp_path / "data"):
        pass


def test_the_lock_dies_with_its_process_although_a_child_lives_on(tmp_path):
    code = (
        "import os, subprocess, sys; from pathlib import Path; from app.shared.storage import data_folder_lock\n"
        "with data_folder_lock(Path(sys.argv[1])):\n"
        "    child = subprocess.Popen('exec sleep 30 >&- 2>&-', shell=True, close_fds=False)\n"
        "    print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    try:
        with data_folder_lock(tmp_path):
            pass
    finally:
        os.kill(int(result.stdout), 9)


def test_a_folder_that_cannot_be_used_is_told_apart(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        ArtifactStore(tmp_path / "file")
