import logging

import pytest

from app.shared.errors import DatabaseUnavailableError, DiskFullError, FencedOutError, StorageError
from rocket_core.errors import (
    CompressionCancelledError,
    HubUnavailableError,
    InsufficientMemoryError,
    UnsupportedArchitectureError,
    WorkFolderBusyError,
)
from worker.failures import failure_of, log_failures, reported


@pytest.fixture
def fail():
    """Return the failure of a job whose work raises an error."""

    def fail(error, hidden=None):
        def work():
            raise error

        return failure_of(work, location=lambda: ("calibrating", "layer 3"), hidden=hidden or {})

    return fail


def test_successful_work_is_not_a_failure():
    done = []
    assert failure_of(lambda: done.append(1), location=lambda: (None, None), hidden={}) is None
    assert done == [1]


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (UnsupportedArchitectureError("no"), "unsupported_architecture", False),
        (InsufficientMemoryError("no"), "insufficient_memory", False),
        (HubUnavailableError("no"), "hub_unavailable", True),
        (WorkFolderBusyError("no"), "work_folder_busy", True),
        (DatabaseUnavailableError("no"), "database_unavailable", True),
        (DiskFullError("no"), "disk_full", False),
        (StorageError("no"), "storage_error", False),
    ],
)
def test_known_errors_keep_their_code_and_retryability(fail, error, code, retryable):
    failure = fail(error)
    assert (failure.code, failure.retryable, failure.message) == (code, retryable, "no")
    assert (failure.stage, failure.layer) == ("calibrating", "layer 3")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you ..."
        ),
    ],
)
def test_running_out_of_memory_is_not_retried(fail, error):
    failure = fail(error)
    assert (failure.code, failure.retryable) == ("insufficient_memory", False)
    assert "fewer" in failure.message


@pytest.mark.parametrize("error", [BlockingIOError(11, "canary"), RuntimeError("can't start new thread")])
def test_a_process_or_thread_too_many_is_retried(fail, error):
    failure = fail(error)
    assert (failure.code, failure.retryable) == ("worker_lost", True)
    assert "processes" in failure.message
    assert "canary" not in failure.message
    # Also where a process of the job reports it.
    assert reported(failure.code, failure.message).retryable


@pytest.mark.parametrize("number", [28, 27, 122])
def test_a_full_disk_is_not_retried(fail, number):
    failure = fail(OSError(number, "x", "/secret/place"))
    assert (failure.code, failure.retryable) == ("disk_full", False)
    assert "/secret" not in failure.message


@pytest.mark.parametrize("error", [ValueError("canary"), OSError(5, "canary"), KeyError("canary")])
def test_an_unknown_error_is_logged_and_hidden_from_the_user(fail, error, caplog):
    failure = fail(error)
    assert (failure.code, failure.retryable) == ("internal_error", False)
    assert "canary" not in failure.message
    assert "canary" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "error", [FencedOutError("x"), CompressionCancelledError("x"), KeyboardInterrupt(), SystemExit()]
)
def test_errors_that_are_not_the_jobs_are_raised(fail, error):
    with pytest.raises(type(error)):
        fail(error)


def test_local_folders_are_hidden_the_innermost_first(fail):
    hidden = {"/data": "the data folder", "/data/models/": "local/", "/home/me/": "~/"}
    failure = fail(UnsupportedArchitectureError("/data/models/tiny: see /data/work and /home/me/.cache/x"), hidden)
    assert failure.message == "local/tiny: see the data folder/work and ~/.cache/x"


def test_a_thread_continues_after_any_error(caplog):
    def fail(error):
        raise error

    assert log_failures("working", lambda: None)
    caplog.set_level(logging.WARNING)
    assert not log_failures("working", lambda: fail(DatabaseUnavailableError("no answer")))
    assert "working: no answer" in caplog.text
    assert "Traceback" not in caplog.text
    assert not log_failures("working", lambda: fail(ZeroDivisionError("canary")))
    assert "canary" in caplog.text
    assert "Traceback" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        log_failures("working", lambda: fail(KeyboardInterrupt()))
