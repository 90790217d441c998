"""Work folders, and the lock of a data folder."""

import os
import stat
import subprocess
import sys
import time

import pytest

from app.shared.errors import DataFolderLockedError, StorageError
from app.shared.storage import LocalStore, WorkFolders, data_folder_lock


@pytest.mark.parametrize(
    "key", ["", "..", "../x", "/etc/passwd", "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 32 + "/.."]
)
def test_only_a_valid_key_leads_to_a_folder(tmp_path, key):
    for action in (WorkFolders(tmp_path).path, WorkFolders(tmp_path).remove):
        with pytest.raises(StorageError):
            action(key)


def test_work_folders_are_created_and_removed(tmp_path):
    folders = WorkFolders(tmp_path / "work")
    folder = folders.path("c" * 32)
    (folder / "deep").mkdir()
    (folder / "deep" / "file").touch()
    assert folders.path("c" * 32) == folder
    assert folders.keys(before=time.time() + 1) == ["c" * 32]
    folders.remove("c" * 32)
    folders.remove("c" * 32)
    assert not folder.exists()


def test_new_folders_are_private_and_existing_modes_are_kept(tmp_path):
    (tmp_path / "shared" / "artifacts").mkdir(parents=True)
    (tmp_path / "shared" / "artifacts").chmod(0o770)
    LocalStore(tmp_path / "shared")
    LocalStore(tmp_path)
    WorkFolders(tmp_path / "work")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared/artifacts", "artifacts", "work")]
    assert modes == [0o770, 0o700, 0o700]


def test_a_data_folder_has_one_service_at_a_time(tmp_path):
    second = data_folder_lock(tmp_path / "data")
    with data_folder_lock(tmp_path / "data"), pytest.raises(DataFolderLockedError), second:
        pass
    with data_folder_lock(tmp_path / "data"):
        pass


def test_the_lock_ends_with_its_process_despite_a_living_child(tmp_path):
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
