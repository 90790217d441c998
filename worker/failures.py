"""What an error means for a job: whether it is worth another attempt, and what its user is told.

========================================  ==============================================
what went wrong                           what becomes of the job
========================================  ==============================================
errors of the library, memory, disk       fails: the same job would fail again
network, database, a folder still in use  another attempt, as long as there is one
a process that was killed or has crashed  another attempt, as long as there is one
anything else                             fails with `internal_error`; the trace is logged
========================================  ==============================================
"""

import errno
import logging
import signal
from collections.abc import Callable, Mapping

from app.shared.errors import AppError, DiskFullError, FencedOutError, WorkerLostError
from app.shared.outcomes import JobError
from rocket_core.errors import CompressionCancelledError, InsufficientMemoryError, RocketError

INTERNAL_ERROR = "internal_error"

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_OUT_OF_MEMORY = "memory ran out; use fewer or shorter samples, or a machine with more memory"
_INTERNAL = "an error inside the service; the worker's log has the details under this job's id"
# What Rust, C++ and the runtime of OpenMP print before they end a process that gets no memory.
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
    """A process of the job has failed, with an error that is known already.

    Attributes:
        error: the error, without stage and layer.
        is_logged: whether that process has logged it.
    """

    def __init__(self, error: JobError, *, is_logged: bool = False) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error
        self.is_logged = is_logged


def attempted(what: str, action: Callable[[], object]) -> bool:
    """Does what a thread does again and again, and says whether it went well.

    A thread that ended over an error, a bug of ours included, would leave a worker that lives and does nothing.

    Args:
        what: what is done, for the log.
        action: does it.
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
    work: Callable[[], None], *, place: Callable[[], tuple[str | None, str | None]], hidden: Mapping[str, str]
) -> JobError | None:
    """Does the work and says what went wrong with it, if anything.

    The only place that catches every error: whatever happens inside a job must end in its row.

    Args:
        work: what to do.
        place: tells the stage and the layer that were being worked on.
        hidden: folders of this machine, with what the user reads in their stead.

    Returns:
        None if all went well.

    Raises:
        FencedOutError: the job is no longer this worker's, so that there is nobody to tell.
        CompressionCancelledError: it was asked to stop.
    """
    try:
        work()
    except (FencedOutError, CompressionCancelledError):
        raise
    except Exception as error:  # noqa: BLE001
        stage, layer = place()
        return _describe(error, stage, layer, hidden)
    return None


def reported(code: str, message: str) -> JobError:
    """Return the error that a process of the job has sent, which is not trusted: an unknown code says nothing."""
    known = {kind.code: kind.retryable for kind in _kinds(RocketError)} | {DiskFullError.code: DiskFullError.retryable}
    if code in known and code != CompressionCancelledError.code:
        return JobError(code=code, message=message, retryable=known[code])
    return internal_error()


def internal_error() -> JobError:
    """Return the error whose details are in the log."""
    return JobError(code=INTERNAL_ERROR, message=_INTERNAL)


def lost(message: str) -> JobError:
    """Return the error of a process that has ended without a word."""
    return JobError(code=WorkerLostError.code, message=message, retryable=True)


def ended(exit_code: int, *, last_words: str = "", ran_out: bool = False) -> JobError:
    """Return the error of a process that has ended without saying how.

    Args:
        exit_code: as `subprocess` has it: negative numbers are signals.
        last_words: the last lines that it has printed.
        ran_out: whether the kernel has killed a process of the job for its memory.
    """
    if ran_out or (exit_code != 0 and any(words in last_words for words in _LAST_WORDS_WITHOUT_MEMORY)):
        return JobError(code=InsufficientMemoryError.code, message=_OUT_OF_MEMORY)
    if exit_code == -signal.SIGKILL:
        return lost(
            "the job's process was killed, as the system does when memory runs out; use fewer or shorter samples, or a "
            "machine with more memory"
        )
    if exit_code < 0:
        return lost(f"the job's process crashed ({signal.strsignal(-exit_code)}); see the worker's log")
    return lost(f"the job's process ended with exit code {exit_code}; see the worker's log")


def _kinds(base: type[RocketError]) -> list[type[RocketError]]:
    return [base, *(kind for below in base.__subclasses__() for kind in _kinds(below))]


def _describe(error: Exception, stage: str | None, layer: str | None, hidden: Mapping[str, str]) -> JobError:
    match error:
        case ReportedError():
            level = logging.DEBUG if error.is_logged else logging.WARNING
            _log.log(level, "the job failed: %s", error, extra={"code": error.error.code})
            code, retryable = error.error.code, error.error.retryable
            message = _without_folders(error.error.message, hidden)
        case RocketError() | AppError():
            _log.warning("the job failed: %s", error, extra={"code": error.code})
            code, message, retryable = error.code, _without_folders(str(error), hidden), error.retryable
        case _ if _is_out_of_memory(error):
            _log.warning("the job failed: out of memory", exc_info=error)
            code, retryable = InsufficientMemoryError.code, False
            message = _OUT_OF_MEMORY
        case OSError() if error.errno in _NO_ROOM:
            _log.warning("the job failed: no room on the disk: %s", error)
            code, retryable = DiskFullError.code, False
            message = "no room is left on the service's disk; free some, then retry the job"
        case _:
            _log.error("unexpected error", exc_info=error)
            code, retryable = INTERNAL_ERROR, False
            message = _INTERNAL
    return JobError(code=code, message=message, stage=stage, layer=layer, retryable=retryable)


def _is_out_of_memory(error: Exception) -> bool:
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            # Torch has no class of its own for memory of the CPU.
            return "can't allocate memory" in str(error)
        case _:
            return False


def _without_folders(message: str, hidden: Mapping[str, str]) -> str:
    # The longest first: a folder may lie in another.
    for folder in sorted(hidden, key=len, reverse=True):
        message = message.replace(folder, hidden[folder])
    return message
