import errno
import inspect
from collections.abc import Iterable, Iterator

import pytest
import torch
import typer

from app.api.problems import status_of
from app.shared import errors as service_errors
from rocket_cli.exit_codes import (
    MEANINGS,
    describe,
    exit_code_of_code,
    reported_failures,
)
from rocket_client import errors as client_errors
from rocket_core import errors
from rocket_core.errors import ExitCode

LIBRARY_CODES = {
    1: ["faulty_result", "rocket_error"],
    2: ["hub_refuses", "invalid_config", "push_failed", "unmatched_ignore"],
    3: [
        "already_quantized",
        "calibration_empty",
        "calibration_failed",
        "calibration_non_finite",
        "ill_conditioned_gram",
        "model_not_found",
        "unknown_dataset",
        "unsafe_file",
        "unsupported_architecture",
        "unsupported_export",
    ],
    4: ["infeasible_budget"],
    5: ["insufficient_disk", "insufficient_memory", "insufficient_resources"],
    6: ["checkpoint_error", "checkpoint_format", "corrupt_checkpoint", "stale_work_folder"],
    8: ["repository_is_public"],
    75: ["hub_cache_busy", "hub_unavailable", "work_folder_busy"],
    77: ["hub_forbidden", "hub_token_invalid"],
    130: ["cancelled"],
}
SERVICE_CODES = {
    1: ["app_error", "job_stalled", "storage_error", "worker_lost"],
    2: ["data_folder_locked", "idempotency_key_reused", "invalid_request", "invalid_settings", "over_quota"],
    3: ["upload_not_found"],
    5: ["disk_full"],
    7: [
        "artifact_expired",
        "artifact_not_found",
        "job_not_found",
        "link_not_found",
        "model_upload_not_found",
        "not_found",
        "profile_not_found",
        "webhook_not_found",
    ],
    8: ["fenced_out", "job_state_conflict", "model_not_ready", "model_upload_conflict", "report_not_ready"],
    75: [
        "busy",
        "database_unavailable",
        "queue_unavailable",
        "quota_exceeded",
        "rate_limited",
        "storage_unavailable",
        "too_many_streams",
        "too_many_uploads",
    ],
    77: ["permission_denied", "unauthenticated"],
}
CLIENT_CLASSES = {
    1: ["ClientError"],
    2: ["HubRefusesError", "InvalidArgumentError", "PushError", "UnexpectedAnswerError"],
    5: ["NotEnoughDiskError"],
    6: ["DigestMismatchError", "DownloadError", "UnsafeNameError"],
    8: ["NothingToDownloadError", "PublicRepositoryError"],
    75: ["FolderBusyError", "HubUnreachableError", "ServerUnreachableError", "StoreUnreachableError"],
    77: ["HubForbiddenError", "HubTokenError"],
    130: ["DetachedError"],
}
# Errors of jobs that are not the library's, by code and whether the same job may succeed later.
JOB_CODES = {
    ("disk_full", False): 5,
    ("upload_not_found", False): 3,
    ("invalid_settings", False): 2,
    ("storage_error", False): 1,
    ("storage_unavailable", True): 75,
    ("database_unavailable", True): 75,
    ("worker_lost", True): 1,
    ("job_stalled", True): 1,
    ("internal_error", False): 1,
}


def subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def by_exit_code(pairs: Iterable[tuple[str, int]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, code in sorted(pairs):
        found.setdefault(int(code), []).append(name)
    return found


def test_every_error_of_the_library_has_its_exit_code() -> None:
    defined = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RocketError)}

    assert by_exit_code((kind.code, kind.exit_code) for kind in defined) == LIBRARY_CODES
    assert {kind for kind in subclasses(errors.RocketError) if kind.__module__.startswith("rocket")} <= defined


def test_every_client_error_has_an_exit_code_and_is_documented() -> None:
    defined = {client_errors.ClientError, *subclasses(client_errors.ClientError)}

    # A problem's depends on its code and status.
    pairs = ((kind.__name__, kind.exit_code) for kind in defined - {client_errors.ProblemError})
    assert by_exit_code(pairs) == CLIENT_CLASSES
    assert all(kind.__name__ in client_errors.__doc__ for kind in defined - {client_errors.ClientError})
    assert len({kind.code for kind in defined - {client_errors.ProblemError}}) == len(defined) - 1


def test_every_error_of_the_service_has_its_exit_code() -> None:
    kinds = {service_errors.AppError, *subclasses(service_errors.AppError)}

    pairs = ((kind.code, exit_code_of_code(kind.code, status=status_of(kind))) for kind in kinds)
    assert by_exit_code(pairs) == SERVICE_CODES
    assert {kind.code for kind in kinds}.isdisjoint(kind.code for kind in subclasses(errors.RocketError))


@pytest.mark.parametrize(("code", "retryable"), JOB_CODES)
def test_error_of_a_job_has_its_exit_code(code: str, retryable: bool) -> None:
    assert exit_code_of_code(code, retryable=retryable) == JOB_CODES[code, retryable]


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
    assert exit_code_of_code(code, status=status) == exit_code


def test_an_internal_server_error_names_its_request() -> None:
    failure = describe(client_errors.ProblemError(status=500, code="storage_error", detail="x", request_id="r-1"))

    assert failure is not None
    assert "r-1" in failure.message
    assert failure.details == {"status": 500, "request_id": "r-1"}


def test_every_exit_code_is_documented() -> None:
    assert set(MEANINGS) == set(ExitCode)


def test_only_retryable_errors_are_temporary() -> None:
    kinds = [errors.RocketError, *subclasses(errors.RocketError)]
    assert all((kind.exit_code is ExitCode.TEMPORARY) == kind.retryable for kind in kinds)


def test_an_unlisted_class_has_the_exit_code_of_its_base() -> None:
    class NewResourceError(errors.ResourceError):
        pass

    assert NewResourceError.exit_code is ExitCode.MACHINE_TOO_SMALL


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
        (ModuleNotFoundError("no torch", name="torch"), "missing_extra", 2),
        (ImportError("cannot import", name="transformers.utils"), "missing_extra", 2),
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
