"""Exit codes and error reporting of commands."""

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from http import HTTPStatus

import typer

from rocket_client import errors as client_errors
from rocket_core import errors


class ExitCode(IntEnum):
    """Exit codes of all commands. 75 and 77 are from sysexits.h; 130 is what shells use for Ctrl-C."""

    OK = 0
    INTERNAL = 1
    INVALID = 2
    UNUSABLE_INPUT = 3
    OUT_OF_REACH = 4
    MACHINE_TOO_SMALL = 5
    SAVED_STATE = 6
    NOT_FOUND = 7
    CONFLICT = 8
    CANCELLED = 9
    TEMPORARY = 75
    NOT_ALLOWED = 77
    INTERRUPTED = 130


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.INTERNAL: "unexpected error; please report it",
    ExitCode.INVALID: "wrong usage or settings",
    ExitCode.UNUSABLE_INPUT: "the model or the text cannot be used",
    ExitCode.OUT_OF_REACH: "ratio out of reach; the message names the nearest one",
    ExitCode.MACHINE_TOO_SMALL: "too little memory or disk",
    ExitCode.SAVED_STATE: "weights or a download are damaged, or the work folder is another run's",
    ExitCode.NOT_FOUND: "the server has no such job or file",
    ExitCode.CONFLICT: "the job's status does not allow it, or the repository is public",
    ExitCode.CANCELLED: "the job was cancelled",
    ExitCode.TEMPORARY: "the model hub or the server cannot be reached; try again later",
    ExitCode.NOT_ALLOWED: "the API key (ROCKET_API_KEY) or Hub token is missing or may not do this",
    ExitCode.INTERRUPTED: "interrupted; a compression can be resumed, a job continues",
}

EXIT_CODES: Mapping[type[errors.RocketError], ExitCode] = {
    errors.RocketError: ExitCode.INTERNAL,
    errors.InvalidConfigError: ExitCode.INVALID,
    errors.UnknownDatasetError: ExitCode.UNUSABLE_INPUT,
    errors.UnmatchedIgnoreError: ExitCode.INVALID,
    errors.ModelNotFoundError: ExitCode.UNUSABLE_INPUT,
    errors.HubUnavailableError: ExitCode.TEMPORARY,
    errors.UnsupportedArchitectureError: ExitCode.UNUSABLE_INPUT,
    errors.AlreadyQuantizedError: ExitCode.UNUSABLE_INPUT,
    errors.CalibrationError: ExitCode.UNUSABLE_INPUT,
    errors.EmptyCalibrationError: ExitCode.UNUSABLE_INPUT,
    errors.NonFiniteCalibrationError: ExitCode.UNUSABLE_INPUT,
    errors.IllConditionedGramError: ExitCode.UNUSABLE_INPUT,
    errors.InfeasibleBudgetError: ExitCode.OUT_OF_REACH,
    errors.ResourceError: ExitCode.MACHINE_TOO_SMALL,
    errors.InsufficientMemoryError: ExitCode.MACHINE_TOO_SMALL,
    errors.InsufficientDiskError: ExitCode.MACHINE_TOO_SMALL,
    errors.HubCacheBusyError: ExitCode.TEMPORARY,
    errors.WorkFolderError: ExitCode.SAVED_STATE,
    errors.WorkFolderBusyError: ExitCode.TEMPORARY,
    errors.CheckpointError: ExitCode.SAVED_STATE,
    errors.CheckpointFormatError: ExitCode.SAVED_STATE,
    errors.CorruptCheckpointError: ExitCode.SAVED_STATE,
    errors.UnsafeFileError: ExitCode.UNUSABLE_INPUT,
    errors.CompressionCancelledError: ExitCode.INTERRUPTED,
}

# Codes of `app.shared.errors`, which a client does not import.
SERVICE_CODES: Mapping[str, ExitCode] = {
    "app_error": ExitCode.INTERNAL,
    "invalid_settings": ExitCode.INVALID,
    "invalid_request": ExitCode.INVALID,
    "idempotency_key_reused": ExitCode.INVALID,
    "not_found": ExitCode.NOT_FOUND,
    "job_not_found": ExitCode.NOT_FOUND,
    "artifact_not_found": ExitCode.NOT_FOUND,
    "upload_not_found": ExitCode.UNUSABLE_INPUT,
    "profile_not_found": ExitCode.NOT_FOUND,
    "artifact_expired": ExitCode.NOT_FOUND,
    "job_state_conflict": ExitCode.CONFLICT,
    "report_not_ready": ExitCode.CONFLICT,
    "fenced_out": ExitCode.CONFLICT,
    "unauthenticated": ExitCode.NOT_ALLOWED,
    "permission_denied": ExitCode.NOT_ALLOWED,
    "quota_exceeded": ExitCode.TEMPORARY,
    "rate_limited": ExitCode.TEMPORARY,
    "busy": ExitCode.TEMPORARY,
    "over_quota": ExitCode.INVALID,
    "too_many_streams": ExitCode.TEMPORARY,
    "too_many_uploads": ExitCode.TEMPORARY,
    "storage_error": ExitCode.INTERNAL,
    "disk_full": ExitCode.MACHINE_TOO_SMALL,
    "storage_unavailable": ExitCode.TEMPORARY,
    "data_folder_locked": ExitCode.INVALID,
    "database_unavailable": ExitCode.TEMPORARY,
    "queue_unavailable": ExitCode.TEMPORARY,
    "worker_lost": ExitCode.INTERNAL,
    "job_stalled": ExitCode.INTERNAL,
}

CLIENT_EXIT_CODES: Mapping[type[client_errors.ClientError], ExitCode] = {
    client_errors.ClientError: ExitCode.INTERNAL,
    client_errors.InvalidArgumentError: ExitCode.INVALID,
    client_errors.ServerUnreachableError: ExitCode.TEMPORARY,
    client_errors.StoreUnreachableError: ExitCode.TEMPORARY,
    client_errors.UnexpectedAnswerError: ExitCode.INVALID,
    client_errors.ProblemError: ExitCode.INVALID,
    client_errors.DetachedError: ExitCode.INTERRUPTED,
    client_errors.DownloadError: ExitCode.SAVED_STATE,
    client_errors.NothingToDownloadError: ExitCode.CONFLICT,
    client_errors.UnsafeNameError: ExitCode.SAVED_STATE,
    client_errors.FolderBusyError: ExitCode.TEMPORARY,
    client_errors.NotEnoughDiskError: ExitCode.MACHINE_TOO_SMALL,
    client_errors.DigestMismatchError: ExitCode.SAVED_STATE,
    client_errors.PushError: ExitCode.INVALID,
    client_errors.HubTokenError: ExitCode.NOT_ALLOWED,
    client_errors.HubForbiddenError: ExitCode.NOT_ALLOWED,
    client_errors.HubUnreachableError: ExitCode.TEMPORARY,
    client_errors.PublicRepositoryError: ExitCode.CONFLICT,
    client_errors.HubRefusesError: ExitCode.INVALID,
}

_BY_CODE: Mapping[str, ExitCode] = {**{kind.code: exit_code for kind, exit_code in EXIT_CODES.items()}, **SERVICE_CODES}
# For codes that a newer server adds, and for errors of its web framework.
_BY_STATUS: Mapping[int | None, ExitCode] = {
    401: ExitCode.NOT_ALLOWED,
    403: ExitCode.NOT_ALLOWED,
    404: ExitCode.NOT_FOUND,
    408: ExitCode.TEMPORARY,
    409: ExitCode.CONFLICT,
    410: ExitCode.NOT_FOUND,
    429: ExitCode.TEMPORARY,
    503: ExitCode.TEMPORARY,
}

# Packages of the `worker` extra, which a base install does not have.
_WORKER_PACKAGES = frozenset(
    {
        "accelerate",
        "datasets",
        "psutil",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    }
)
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Outcomes that the user asked for.
_NO_ERRORS = frozenset({ExitCode.INTERRUPTED, ExitCode.CANCELLED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error as it is reported to the user.

    Attributes:
        code: stable name of the problem, for programs.
        message: what is wrong and what to do.
        exit_code: the command's exit code.
        details: further details, for programs.
    """

    code: str
    message: str
    exit_code: ExitCode
    details: Mapping[str, str | int] = field(default_factory=dict)


def _no_advice(code: ExitCode) -> None:
    """Do nothing: the default of `advice`."""


@contextmanager
def reported_failures(*, as_json: bool, advice: Callable[[ExitCode], None] = _no_advice) -> Iterator[None]:
    """End the command with a message and an exit code for every error except a bug.

    Bugs are raised: Python prints their traceback and exits with 1.

    Args:
        as_json: whether to also write `{"error": {"code", "message", ...}}` to stdout.
        advice: called after the message with the exit code, to write what the user can do next.

    Raises:
        typer.Exit: with the exit code, once the message is written.
    """
    try:
        yield
    except (
        errors.RocketError,
        client_errors.ClientError,
        ImportError,
        MemoryError,
        OSError,
        RuntimeError,
        KeyboardInterrupt,
    ) as error:
        failure = describe(error)
        if failure is None:
            raise
        report_failure(failure, as_json=as_json)
        advice(failure.exit_code)
        raise typer.Exit(failure.exit_code) from error


def report_failure(failure: Failure, *, as_json: bool) -> None:
    """Write the message to stderr, and as JSON to stdout."""
    if as_json:
        typer.echo(json.dumps({"error": {"code": failure.code, "message": failure.message, **failure.details}}))
    severity = "" if failure.exit_code in _NO_ERRORS else "error: "
    typer.echo(f"rocket: {severity}{failure.message}", err=True)


def describe(error: BaseException) -> Failure | None:
    """Return the failure that an error is reported as; None if the error is a bug."""
    failure: Failure | None
    match error:
        case errors.RocketError():
            failure = Failure(code=error.code, message=str(error), exit_code=exit_code_of(error))
        case client_errors.ProblemError():
            failure = _problem(error)
        case client_errors.ClientError():
            failure = Failure(code=error.code, message=str(error), exit_code=CLIENT_EXIT_CODES[type(error)])
        case KeyboardInterrupt():
            failure = Failure(code="cancelled", message="interrupted", exit_code=ExitCode.INTERRUPTED)
        case ImportError() if _top_level(error) in _WORKER_PACKAGES:
            failure = _missing_worker_extra(error)
        case OSError() if error.errno in _DISK_FULL:
            failure = _too_small(errors.InsufficientDiskError, f"the disk is full ({_where(error)}); free some space")
        case OSError() if error.filename is not None and error.errno is not None:
            failure = Failure(code="file_error", message=_where(error), exit_code=ExitCode.INVALID)
        case MemoryError():
            failure = _too_small(errors.InsufficientMemoryError, "out of memory; use fewer or shorter samples")
        case RuntimeError() if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            reason = str(error).partition(". ")[0]
            failure = _too_small(errors.InsufficientMemoryError, f"{reason}; use shorter sequences, or --device cpu")
        case _:
            failure = None
    return failure


def exit_code_of(error: errors.RocketError) -> ExitCode:
    """Return the exit code of an error, or of its nearest base class in the table."""
    return next(EXIT_CODES[base] for base in type(error).__mro__ if base in EXIT_CODES)


def exit_code_of_code(code: str, status: int | None = None) -> ExitCode:
    """Return the exit code of a problem that a server reports, or of a job's error.

    Args:
        code: stable code of the problem.
        status: HTTP status; None for a job's error.
    """
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    is_ours = status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return ExitCode.INTERNAL if is_ours else ExitCode.INVALID


def _problem(error: client_errors.ProblemError) -> Failure:
    exit_code = exit_code_of_code(error.code, error.status)
    known = {"status": error.status, "param": error.param, "request_id": error.request_id}
    message = error.detail
    if exit_code is ExitCode.INTERNAL and error.request_id is not None:
        message = f"{message} (the server's log has more under request id {error.request_id})"
    details = {name: value for name, value in known.items() if value is not None}
    return Failure(code=error.code, message=message, exit_code=exit_code, details=details)


def _top_level(error: ImportError) -> str:
    return (error.name or "").partition(".")[0]


def _missing_worker_extra(error: ImportError) -> Failure:
    return Failure(
        code="missing_worker_extra",
        message=f"this command needs {_top_level(error)}, which is not installed or too old; "
        "run: pip install 'rocket-compress[worker]'",
        exit_code=ExitCode.INVALID,
    )


def _too_small(kind: type[errors.ResourceError], message: str) -> Failure:
    return Failure(code=kind.code, message=message, exit_code=EXIT_CODES[kind])


def _where(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
