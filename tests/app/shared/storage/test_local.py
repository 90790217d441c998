"""Behaviour specific to local folders; the rest is in `test_stores`."""

import os
import time

import pytest

from app.shared.errors import DiskFullError, StorageError
from app.shared.storage import LocalStore, local


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "artifacts"


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(3 * 2**20 + 1))
    return file


def refuse_links(monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)


def test_a_stored_file_is_linked_and_survives_its_source(store, source, folder):
    content = source.read_bytes()
    stored = store.put(source)
    assert (folder / stored.key).samefile(source)
    source.unlink()
    assert (folder / stored.key).read_bytes() == content


def test_a_file_is_copied_if_it_cannot_be_linked(store, source, folder, monkeypatch):
    refuse_links(monkeypatch)
    stored = store.put(source)
    assert not (folder / stored.key).samefile(source)
    assert (folder / stored.key).read_bytes() == source.read_bytes()


def test_a_full_disk_leaves_no_partial_file(store, source, folder, monkeypatch):
    def fill(_source, target, **_options):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    refuse_links(monkeypatch)
    monkeypatch.setattr(local.shutil, "copyfile", fill)
    with pytest.raises(DiskFullError):
        store.put(source)
    assert list(folder.iterdir()) == []


def test_a_symlink_in_place_of_a_stored_file_is_not_followed(store, source, folder):
    stored = store.put(source)
    (folder / stored.key).unlink()
    (folder / stored.key).symlink_to("/etc/passwd")
    with pytest.raises(StorageError):
        list(store.read(stored.key, 0, 1))


def test_the_sweep_ignores_files_that_are_not_of_the_store(store, folder):
    for name in ("b" * 32 + ".tmp", "README.tmp", "README"):
        (folder / name).touch()
    assert store.remove_unfinished(before=time.time() + 1) == 1
    assert sorted(file.name for file in folder.iterdir()) == ["README", "README.tmp"]


def test_an_interrupted_claim_does_not_bind_a_store(store, tmp_path):
    (tmp_path / "database").touch()
    assert store.is_bound_to("one")
    assert not store.is_bound_to("two")


def test_an_unusable_folder_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        LocalStore(tmp_path / "file")
