import errno
import inspect
from collections.abc import Iterator

import pytest
import torch
import typer

from app.shared import errors as service_errors
from rocket_cli.exit_codes import (
    CLIENT_EXIT_CODES,
    EXIT_CODES,
    MEANINGS,
    SERVICE_CODES,
    ExitCode,
    describe,
    exit_code_of,
    exit_code_of_code,
    reported_failures,
)
from rocket_client import errors as client_errors
from rocket_core import errors


def subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_error_class_has_an_exit_code() -> None:
    defined = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RocketError)}

    assert defined == set(EXIT_CODES)
    assert {kind for kind in subclasses(errors.RocketError) if kind.__module__.startswith("rocket")} <= defined


def test_every_client_error_has_an_exit_code_and_is_documented() -> None:
    defined = {client_errors.ClientError, *subclasses(client_errors.ClientError)}

    assert defined == set(CLIENT_EXIT_CODES)
    assert all(kind.__name__ in client_errors.__doc__ for kind in defined - {client_errors.ClientError})
    assert len({kind.code for kind in defined - {client_errors.ProblemError}}) == len(defined) - 1


def test_every_service_error_code_has_an_exit_code() -> None:
    codes = {kind.code for kind in {service_errors.AppError, *subclasses(service_errors.AppError)}}

    assert codes == set(SERVICE_CODES)
    assert codes.isdisjoint(kind.code for kind in EXIT_CODES)


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("job_not_found", 404, 7),
        ("infeasible_budget", 422, 4),
        ("hub_unavailable", 503, 75),
        ("bad_request", 400, 2),
        ("not_ready", 503, 75),
        ("of_a_newer_server", 404, 7),
        ("of_a_newer_server", 409, 8),
        ("of_a_newer_server", 500, 1),
        ("of_a_newer_server", None, 1),
        ("internal_error", None, 1),
    ],
)
def test_server_responses_become_exit_codes(code: str, status: int | None, exit_code: int) -> None:
    assert exit_code_of_code(code, status) == exit_code


def test_an_internal_server_error_names_its_request() -> None:
    failure = describe(client_errors.ProblemError(status=500, code="storage_error", detail="x", request_id="r-1"))

    assert failure is not None
    assert "r-1" in failure.message
    assert failure.details == {"status": 500, "request_id": "r-1"}


def test_every_exit_code_is_documented() -> None:
    assert set(MEANINGS) == set(ExitCode)
    assert [kind for kind, code in EXIT_CODES.items() if code is ExitCode.INTERNAL] == [errors.RocketError]
    assert ExitCode.OK not in EXIT_CODES.values()


def test_only_retryable_errors_are_temporary() -> None:
    assert {kind for kind, code in EXIT_CODES.items() if code is ExitCode.TEMPORARY} == {
        kind for kind in EXIT_CODES if kind.retryable
    }


def test_an_unlisted_class_has_the_exit_code_of_its_base() -> None:
    class NewResourceError(errors.ResourceError):
        pass

    assert exit_code_of(NewResourceError("")) is ExitCode.MACHINE_TOO_SMALL


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (errors.UnmatchedIgnoreError("x", position=0), "unmatched_ignore", 2),
        (errors.InfeasibleBudgetError("x", nearest_ratio=0.5), "infeasible_budget", 4),
        (errors.CompressionCancelledError("x"), "cancelled", 130),
        (KeyboardInterrupt(), "cancelled", 130),
        (MemoryError(), "insufficient_memory", 5),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And more"), "insufficient_memory", 5),
        (OSError(errno.ENOSPC, "No space left on device", "/out"), "insufficient_disk", 5),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), "file_error", 2),
        (OSError(errno.EROFS, "Read-only file system", "/out"), "file_error", 2),
        (ModuleNotFoundError("no torch", name="torch"), "missing_worker_extra", 2),
        (ImportError("cannot import", name="transformers.utils"), "missing_worker_extra", 2),
    ],
)
def test_expected_error_becomes_a_message(error: BaseException, code: str, exit_code: int) -> None:
    failure = describe(error)

    assert failure is not None
    assert (failure.code, failure.exit_code) == (code, exit_code)
    assert failure.message


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("no rocket_core.x", name="rocket_core.x"), RuntimeError("bug"), OSError("bug")]
)
def test_an_unexpected_error_is_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)), reported_failures(as_json=False):
        raise error


def test_the_exit_of_a_command_passes_through() -> None:
    with pytest.raises(typer.Exit), reported_failures(as_json=False):
        raise typer.Exit(7)
