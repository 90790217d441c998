"""What an error means for a job: whether it is worth another attempt, and what its user is told.

========================================  ==============================================
what went wrong                           what becomes of the job
========================================  ==============================================
errors of the library, memory, disk       fails: the same job would fail again
network, database, a folder still in use  another attempt, as long as there is one
anything else                             fails with `internal_error`; the trace is logged
========================================  ==============================================
"""

import errno
import logging
from collections.abc import Callable, Mapping

from app.shared.errors import AppError, DiskFullError, FencedOutError
from app.shared.outcomes import JobError
from rocket_core.errors import CompressionCancelledError, InsufficientMemoryError, RocketError

INTERNAL_ERROR = "internal_error"

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_log = logging.getLogger(__name__)


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


def _describe(error: Exception, stage: str | None, layer: str | None, hidden: Mapping[str, str]) -> JobError:
    match error:
        case RocketError() | AppError():
            _log.warning("the job failed: %s", error, extra={"code": error.code})
            code, message, retryable = error.code, _without_folders(str(error), hidden), error.retryable
        case _ if _is_out_of_memory(error):
            _log.warning("the job failed: out of memory", exc_info=error)
            code, retryable = InsufficientMemoryError.code, False
            message = "memory ran out; use fewer or shorter samples, or a machine with more memory"
        case OSError() if error.errno in _NO_ROOM:
            _log.warning("the job failed: no room on the disk: %s", error)
            code, retryable = DiskFullError.code, False
            message = "no room is left on the service's disk; free some, then retry the job"
        case _:
            _log.error("unexpected error", exc_info=error)
            code, retryable = INTERNAL_ERROR, False
            message = "an error inside the service; the worker's log has the details under this job's id"
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
