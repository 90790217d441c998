"""Exit codes and error reporting of commands."""

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import requires

import typer

from rocket_cli.command_words import command_words
from rocket_client import errors as client_errors
from rocket_core import errors
from rocket_core.errors import ExitCode

MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.INTERNAL: "unexpected error; please report it",
    ExitCode.INVALID: "wrong usage or settings",
    ExitCode.UNUSABLE_INPUT: "the model or the text cannot be used",
    ExitCode.OUT_OF_REACH: "the target is out of reach; the message names the nearest ratio",
    ExitCode.MACHINE_TOO_SMALL: "too little memory or disk",
    ExitCode.SAVED_STATE: "damaged weights or download, or the work folder of another run",
    ExitCode.NOT_FOUND: "the server has no such job or file",
    ExitCode.CONFLICT: "the job's status does not allow this, or the repository is public",
    ExitCode.CANCELLED: "the job was cancelled",
    ExitCode.NOT_ACCEPTED: "done and kept, but the result is not accepted (--accept-...); the verdict has the numbers",
    ExitCode.TEMPORARY: "the model hub, the server or a webhook's receiver cannot be reached; try again later",
    ExitCode.NOT_ALLOWED: "the API key (ROCKET_API_KEY) or Hub token is missing or lacks permission",
    ExitCode.INTERRUPTED: "interrupted; a compression can be resumed, a job continues",
}

_LIBRARY_KINDS: Mapping[str, type[errors.RocketError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RocketError)
}

# Errors of a server by HTTP status; of any other status, those below 500 are the caller's, the rest the server's.
_STATUSES: Mapping[int, ExitCode] = {
    401: ExitCode.NOT_ALLOWED,
    403: ExitCode.NOT_ALLOWED,
    404: ExitCode.NOT_FOUND,
    408: ExitCode.TEMPORARY,
    409: ExitCode.CONFLICT,
    410: ExitCode.NOT_FOUND,
    429: ExitCode.TEMPORARY,
    503: ExitCode.TEMPORARY,
}
# Codes of a server that mean something else to the user than their status, or that a job may end with.
_SERVICE_CODES: Mapping[str, ExitCode] = {
    "upload_not_found": ExitCode.UNUSABLE_INPUT,
    "invalid_settings": ExitCode.INVALID,
    "data_folder_locked": ExitCode.INVALID,
    "disk_full": ExitCode.MACHINE_TOO_SMALL,
    # All attempts at the job have failed already.
    "worker_lost": ExitCode.INTERNAL,
    "job_stalled": ExitCode.INTERNAL,
}

# Extras with what commands import, and those to install for it; a service needs all of `worker`.
_EXTRAS = {"torch": "torch", "service": "worker", "worker": "worker", "mcp": "mcp"}
_REQUIREMENT = re.compile(r'([\w.-]+).*; extra == "(\w+)"')
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
    except (Exception, KeyboardInterrupt) as error:
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


def missing_extra(error: ImportError) -> Failure | None:
    """Return the failure of a command whose packages an extra brings; None if none of them does."""
    package = (error.name or "").partition(".")[0]
    extra = _extra_of(package)
    if extra is None:
        return None
    return Failure(
        code="missing_extra",
        message=f"this command needs {package}, which is not installed or too old; "
        f"run: pip install 'rocket-compress[{extra}]'",
        exit_code=ExitCode.INVALID,
    )


def describe(error: BaseException) -> Failure | None:
    """Return the failure that an error is reported as; None if the error is a bug."""
    failure: Failure | None = None
    match error:
        case client_errors.ProblemError():
            failure = _problem(error)
        case errors.RocketError() | client_errors.ClientError():
            failure = Failure(code=error.code, message=str(error), exit_code=error.exit_code)
        case KeyboardInterrupt():
            failure = Failure(code="cancelled", message="interrupted", exit_code=ExitCode.INTERRUPTED)
        case ImportError():
            failure = missing_extra(error)
        case OSError() if error.errno in _DISK_FULL:
            failure = _too_small(errors.InsufficientDiskError, f"the disk is full ({_where(error)}); free some space")
        case OSError() if error.filename is not None and error.errno is not None:
            failure = Failure(code="file_error", message=_where(error), exit_code=ExitCode.INVALID)
        case MemoryError():
            failure = _too_small(errors.InsufficientMemoryError, "out of memory; use fewer or shorter samples")
        case RuntimeError() if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            reason = str(error).partition(". ")[0]
            failure = _too_small(errors.InsufficientMemoryError, f"{reason}; use shorter sequences, or --device cpu")
    return failure


def exit_code_of_code(code: str, *, status: int | None = None, retryable: bool = False) -> ExitCode:
    """Return the exit code of a problem that a server reports, or of a job's error.

    Args:
        code: stable code of the problem; servers of other versions may have codes that are unknown here.
        status: HTTP status; None for a job's error.
        retryable: whether the same job may succeed later.
    """
    if code in _LIBRARY_KINDS:
        return _LIBRARY_KINDS[code].exit_code
    if code in _SERVICE_CODES:
        return _SERVICE_CODES[code]
    if status is None:
        return ExitCode.TEMPORARY if retryable else ExitCode.INTERNAL
    is_servers = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return _STATUSES.get(status, ExitCode.INTERNAL if is_servers else ExitCode.INVALID)


def _problem(error: client_errors.ProblemError) -> Failure:
    exit_code = exit_code_of_code(error.code, status=error.status)
    known = {"status": error.status, "param": error.param, "request_id": error.request_id}
    message = command_words(error.detail)
    if exit_code is ExitCode.INTERNAL and error.request_id is not None:
        message = f"{message} (for details, see request {error.request_id} in the server's log)"
    details = {name: value for name, value in known.items() if value is not None}
    return Failure(code=error.code, message=message, exit_code=exit_code, details=details)


def _extra_of(package: str) -> str | None:
    """Return the extra to install for a package; None if no command imports a package that only an extra brings."""
    found = (_REQUIREMENT.fullmatch(text) for text in requires("rocket-compress") or ())
    extras = {match[2] for match in found if match and match[1].replace("-", "_") == package}
    return next((installed for extra, installed in _EXTRAS.items() if extra in extras), None)


def _too_small(kind: type[errors.ResourceError], message: str) -> Failure:
    return Failure(code=kind.code, message=message, exit_code=kind.exit_code)


def _where(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
