"""Health checks of the service's dependencies."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.services.context import Context
from app.services.timed_check import TimedCheck
from app.shared.errors import DatabaseUnavailableError, DiskFullError, StorageError, StorageUnavailableError
from app.shared.queue import broker_state

# Less free space would not fit the rows of one job.
_LEAST_FREE_BYTES = 2**24
# A dependency that hangs counts as missing after this many seconds; all are checked concurrently.
_SECONDS = 3.0
# Shorter, as the broker is not required.
_BROKER_SECONDS = 1.0
_SILENT = "it does not answer"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The state of the service's dependencies.

    Attributes:
        missing: what keeps the service from accepting jobs, as text for humans.
        broker: how the workers are notified of jobs; without a broker they poll.
    """

    missing: tuple[str, ...]
    broker: str


class Health:
    """Checks of the service's dependencies, which take a few seconds at most.

    Args:
        context: the service.
    """

    def __init__(self, context: Context) -> None:
        # In the order in which they are reported. A check returns what is wrong, or an empty string.
        checks: dict[str, Callable[[], str]] = {
            "database": lambda: _database_fault(context),
            "data folder": lambda: _folder_fault(context),
            "artifact store": lambda: _store_fault(context),
        }
        self._checks = {name: TimedCheck(check) for name, check in checks.items()}
        self._broker = TimedCheck(lambda: broker_state(context.settings))

    def check(self) -> Readiness:
        """Check the dependencies; a missing broker does not prevent readiness, as workers poll instead."""
        began = time.monotonic()

        def left(seconds: float) -> float:
            return began + seconds - time.monotonic()

        broker = self._broker.start()
        pending = {name: check.start() for name, check in self._checks.items()}
        faults = {name: answer.wait(left(_SECONDS)) for name, answer in pending.items()}
        return Readiness(
            missing=tuple(
                f"{name}: {_SILENT if fault is None else fault}" for name, fault in faults.items() if fault != ""
            ),
            broker=broker.wait(left(_BROKER_SECONDS)) or "unreachable; workers poll",
        )


def _database_fault(context: Context) -> str:
    try:
        is_current = context.database.is_current()
    except DatabaseUnavailableError as error:
        return str(error)
    return "" if is_current else "its schema is not that of this version; run `rocket migrate`"


def _folder_fault(context: Context) -> str:
    if not os.access(context.settings.data_dir, os.W_OK | os.X_OK):
        return "it cannot be written"
    if shutil.disk_usage(context.settings.data_dir).free < _LEAST_FREE_BYTES:
        return "its disk is full"
    return ""


def _store_fault(context: Context) -> str:
    try:
        context.artifacts.check()
    except DiskFullError:
        return "it is full"
    except StorageUnavailableError:
        return _SILENT
    except StorageError as error:
        # The error itself contains paths of this machine.
        _log.warning("%s", error, extra={"code": error.code})
        return "it cannot be written"
    return ""
