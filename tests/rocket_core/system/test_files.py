import os
import subprocess
import sys

import pytest

from rocket_core.system.files import atomic_write, lock, locked


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    with atomic_write(tmp_path / "file") as stream:
        stream.write(b"new")
        assert [file.name for file in tmp_path.iterdir()] == [".file.partial"]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"new"}


def test_an_interrupted_write_leaves_nothing_behind(tmp_path):
    def interrupted():
        with atomic_write(tmp_path / "file") as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_bytes(b"old")

    def interrupted():
        with atomic_write(tmp_path / "file") as stream:
            stream.write(b"ne")
            raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        interrupted()
    assert (tmp_path / "file").read_bytes() == b"old"


def test_writers_with_their_own_temporary_files_do_not_mix(tmp_path):
    target = tmp_path / "file"
    with atomic_write(target, temporary=tmp_path / "1") as one, atomic_write(target, temporary=tmp_path / "2") as two:
        one.write(b"one")
        two.write(b"second")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"one"}


@pytest.fixture(params=["file", "folder"])
def path(request, tmp_path):
    if request.param == "folder":
        (tmp_path / "folder").mkdir()
    return tmp_path / request.param


def test_an_exclusive_lock_excludes_all_others(path):
    with locked(path):
        for shared in (False, True):
            with pytest.raises(BlockingIOError), locked(path, shared=shared):
                pass
    with locked(path):
        pass


def test_shared_locks_exclude_only_an_exclusive_one(path):
    with locked(path, shared=True), locked(path, shared=True), pytest.raises(BlockingIOError), locked(path):
        pass


def test_a_lock_file_keeps_its_content(tmp_path):
    (tmp_path / "lock").write_text("kept")
    with locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "kept"


def test_a_killed_process_holds_no_lock(path):
    program = (
        "import pathlib, sys, time\n"
        "from rocket_core.system.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        with pytest.raises(BlockingIOError), locked(path):
            pass
        process.kill()
    with locked(path):
        pass


def test_a_child_program_does_not_inherit_a_lock(path):
    program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with locked(path):
        sleeper = subprocess.Popen(program, close_fds=False, stdout=subprocess.PIPE)
        assert sleeper.stdout.readline()
    with sleeper:
        with locked(path):
            pass
        sleeper.kill()


def test_a_lock_is_converted(tmp_path):
    descriptors = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    try:
        assert lock(descriptors[0])
        assert not lock(descriptors[1], shared=True)
        assert lock(descriptors[0], shared=True, wait=True)
        assert lock(descriptors[1], shared=True)
        assert not lock(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
