"""Meaning of errors for a job: whether it is retried, and the message that its user sees.

========================================  ==============================================
error                                     outcome of the job
========================================  ==============================================
errors of the library, memory, disk       fails: a retry would fail as well
network, database, a folder still in use  retried while attempts are left
a tokenizer that does not return          fails: a retry would fail as well
a process that was killed or crashed      retried while attempts are left
no process or thread can be started       retried while attempts are left
anything else                             fails with `internal_error`; the traceback is logged
========================================  ==============================================
"""

import errno
import logging
import signal
from collections.abc import Callable, Mapping

from app.shared.errors import AppError, DiskFullError, FencedOutError, WorkerLostError, is_disk_full
from app.shared.outcomes import JobError
from rocket_core.errors import CheckpointFormatError, CompressionCancelledError, InsufficientMemoryError, RocketError

INTERNAL_ERROR = "internal_error"

_LESS_MEMORY = "use fewer or shorter samples, or a machine with more memory"
_OUT_OF_MEMORY = JobError(code=InsufficientMemoryError.code, message=f"memory ran out; {_LESS_MEMORY}")
_TOO_SLOW = (
    "the model's tokenizer or processor took too much processor time, and was stopped; replace tokenizer.json and the "
    "files next to it by the original ones"
)
_INTERNAL = "an unexpected error occurred; the worker's log has the details under this job's id"
# What Rust, C++ and the OpenMP runtime print before they end a process whose allocation failed.
_LAST_WORDS_WITHOUT_MEMORY = (
    "memory allocation of",
    "std::bad_alloc",
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "libgomp: Out of memory",
)
_log = logging.getLogger(__name__)


class ReportedError(Exception):
    """A process of the job failed with an error that it reported.

    Attributes:
        error: the error, without stage and layer.
        is_logged: whether that process logged it.
    """

    def __init__(self, error: JobError, *, is_logged: bool = False) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error
        self.is_logged = is_logged


def log_failures(what: str, action: Callable[[], object]) -> bool:
    """Run an action that a thread repeats, log its errors, and return whether it succeeded.

    No error may end the thread, not even one from a bug: the worker would stay alive and do nothing.

    Args:
        what: description of the action, for the log.
        action: the action.
    """
    try:
        action()
    except AppError as error:
        _log.warning("%s: %s", what, error)
    except Exception as error:  # noqa: BLE001
        _log.error("unexpected error while %s", what, exc_info=error)
    else:
        return True
    return False


def failure_of(
    work: Callable[[], None], *, location: Callable[[], tuple[str | None, str | None]], hidden: Mapping[str, str]
) -> JobError | None:
    """Do the work and return its error, if any.

    This is the only place that catches every error: whatever happens inside a job must be recorded in its row.

    Args:
        work: the work.
        location: returns the current stage and layer.
        hidden: folders of this machine, with the text that replaces them in messages to the user.

    Returns:
        The error; None if the work succeeded.

    Raises:
        FencedOutError: the job no longer belongs to this worker, so the error cannot be recorded.
        CompressionCancelledError: the work was asked to stop.
    """
    try:
        work()
    except (FencedOutError, CompressionCancelledError):
        raise
    except Exception as error:  # noqa: BLE001
        stage, layer = location()
        return _describe(error, hidden).model_copy(update={"stage": stage, "layer": layer})
    return None


def reported(code: str, message: str) -> JobError:
    """Return the error that a process of the job sent; it is untrusted, so unknown codes become internal errors."""
    known = {kind.code: kind.retryable for kind in _kinds(RocketError)}
    known |= {DiskFullError.code: DiskFullError.retryable, WorkerLostError.code: True}
    if code in known and code != CompressionCancelledError.code:
        return JobError(code=code, message=message, retryable=known[code])
    return internal_error()


def internal_error() -> JobError:
    """Return the error whose details are only in the log."""
    return JobError(code=INTERNAL_ERROR, message=_INTERNAL)


def lost(message: str) -> JobError:
    """Return the retryable error of a process that ended without reporting an outcome."""
    return JobError(code=WorkerLostError.code, message=message, retryable=True)


def ended(exit_code: int, *, last_words: str = "", ran_out: bool = False) -> JobError:
    """Return the error of a process that ended without reporting an outcome, by its exit code and output.

    Args:
        exit_code: as in `subprocess`: negative numbers are signals.
        last_words: the last lines that it printed.
        ran_out: whether the kernel killed a process of the job for using too much memory.
    """
    if ran_out or (exit_code != 0 and any(words in last_words for words in _LAST_WORDS_WITHOUT_MEMORY)):
        return _OUT_OF_MEMORY
    if exit_code == -signal.SIGPROF:
        # See `rocket_core.system.time_limit`.
        return JobError(code=CheckpointFormatError.code, message=_TOO_SLOW)
    if exit_code == -signal.SIGKILL:
        return lost(f"the job's process was killed, probably because memory ran out; {_LESS_MEMORY}")
    if exit_code < 0:
        return lost(f"the job's process crashed ({signal.strsignal(-exit_code)}); see the worker's log")
    return lost(f"the job's process ended with exit code {exit_code}; see the worker's log")


def _kinds(base: type[RocketError]) -> list[type[RocketError]]:
    return [base, *(kind for below in base.__subclasses__() for kind in _kinds(below))]


def _describe(error: Exception, hidden: Mapping[str, str]) -> JobError:
    match error:
        case ReportedError():
            level = logging.DEBUG if error.is_logged else logging.WARNING
            _log.log(level, "the job failed: %s", error, extra={"code": error.error.code})
            return error.error.model_copy(update={"message": _without_folders(error.error.message, hidden)})
        case RocketError() | AppError():
            _log.warning("the job failed: %s", error, extra={"code": error.code})
            return JobError(code=error.code, message=_without_folders(str(error), hidden), retryable=error.retryable)
        case _ if _is_out_of_memory(error):
            _log.warning("the job failed: out of memory", exc_info=error)
            return _OUT_OF_MEMORY
        case _ if _lacks_processes(error):
            _log.warning("the job failed: no process or thread can be started", exc_info=error)
            return lost("the worker's machine has too many processes; raise the limit on them if this happens again")
        case OSError() if is_disk_full(error):
            _log.warning("the job failed: the disk is full: %s", error)
            return JobError(
                code=DiskFullError.code, message="the service's disk is full; free some space, then retry the job"
            )
        case _:
            _log.error("unexpected error", exc_info=error)
            return internal_error()


def _is_out_of_memory(error: Exception) -> bool:
    # Torch has no exception class for running out of CPU memory.
    of_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return of_torch or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _lacks_processes(error: Exception) -> bool:
    # Python has no exception class for threads that cannot be started.
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return no_thread or (isinstance(error, OSError) and error.errno == errno.EAGAIN)


def _without_folders(message: str, hidden: Mapping[str, str]) -> str:
    # The longest first: one folder may be inside another.
    for folder in sorted(hidden, key=len, reverse=True):
        message = message.replace(folder, hidden[folder])
    return message
