"""Keeping a lease: a thread of the job's process renews it, and ends the process once the lease is lost."""

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from app.shared.database import Database
from app.shared.errors import FencedOutError
from app.shared.lifecycle import Status
from app.shared.repositories import leases
from app.shared.repositories.leases import Lease
from app.shared.settings import Settings
from worker.failures import log_failures
from worker.processes.linux import exit_at_once

_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Context manager that renews a lease.

    The process exits immediately when the job was taken from it, when it could not renew the lease for its whole
    duration, and when its parent is gone: another worker may have the job then.

    Args:
        database: the database.
        lease: the lease.
        settings: how long the lease lasts, and how often it is renewed.
        parent: process id of the supervisor.
        on_stop: called when the user cancels the job; may be called repeatedly.
        on_lost: ends the process.
    """

    def __init__(
        self,
        database: Database,
        lease: Lease,
        settings: Settings,
        *,
        parent: int,
        on_stop: Callable[[], None],
        on_lost: Callable[[], None] = exit_at_once,
    ) -> None:
        self._database = database
        self._lease = lease
        self._settings = settings
        self._parent = parent
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        """Start renewing."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing; the lease itself remains. End the job only after this, or it would count as taken away."""
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        interval = self._settings.heartbeat_seconds
        renewed = time.monotonic()
        due = renewed
        while not self._done.is_set():
            if os.getppid() != self._parent:
                _log.warning(
                    "the worker has ended, so this job's process ends too; another attempt resumes from its checkpoints"
                )
                self._on_lost()
                return
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                began = time.monotonic()
                if log_failures("renewing the lease", self._renew):
                    renewed = began
            if time.monotonic() - renewed > self._settings.lease_seconds:
                _log.warning(
                    "the lease expired because it could not be renewed in the database; this job's process ends"
                )
                self._on_lost()
                return
            self._done.wait(min(_LOOK_SECONDS, interval))

    def _renew(self) -> None:
        try:
            with self._database.transaction() as session:
                status = leases.heartbeat(session, self._lease, lease_seconds=self._settings.lease_seconds)
        except FencedOutError as error:
            _log.warning("%s", error)
            self._on_lost()
            raise
        if status == Status.CANCELLING:
            self._on_stop()
