"""Ringing the broker's doorbell for jobs that wait, in a thread of its own.

A broker that hangs holds up whoever speaks to it, for a minute at times. So neither a request nor the sweep that judges
leases does: they write an announcement into the database, in the transaction that queues the job, and this thread sends
it. What cannot be sent stays; workers find the jobs by polling meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection

from celery import Celery

from app.shared.database import Database
from app.shared.errors import AppError, QueueError
from app.shared.queue import audible_queues, ring
from app.shared.repositories import sweeps
from app.shared.requests import Queue
from app.shared.settings import Settings

# Between two tries at a broker that does not answer.
_PATIENCE_SECONDS = 5.0
# Longer than a broker that hangs keeps its caller, as its time limits are.
_STOP_SECONDS = 10.0
_log = logging.getLogger(__name__)


class Relay:
    """Sends announcements as soon as it is woken, and those of others when it looks.

    Several may run side by side, one in each process: a message that is sent twice does no harm.

    Args:
        settings: of the service.
        database: where the announcements are.
        celery: the way to the broker.
        queues: those that a worker of this process hears.
        guard: does each round of it, under a name for the log; a worker's survives errors that nobody foresaw.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        celery: Celery,
        *,
        queues: Collection[Queue] = (),
        guard: Callable[[str, Callable[[], None]], object] = lambda _what, action: action(),
    ) -> None:
        self._settings = settings
        self._database = database
        self._celery = celery
        self._queues = audible_queues(settings, queues)
        self._guard = guard
        self._is_stopping = False
        self._is_silent = False
        self._resume_at = 0.0
        self._woken = threading.Event()
        # A daemon: a broker that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Begins, unless nobody could hear a message of this process."""
        if self._queues:
            self._thread.start()

    def wake(self) -> None:
        """Has it look at once; returns at once."""
        self._woken.set()

    def stop(self) -> None:
        """Ends it, and waits for that unless the broker keeps it."""
        self._is_stopping = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def deliver(self) -> None:
        """Sends what waits.

        Raises:
            QueueError: the broker does not answer; what was not sent stays.
            DatabaseUnavailableError: the announcements cannot be read.
        """
        while not self._is_stopping:
            with self._database.snapshot() as session:
                waiting = sweeps.list_announcements(session, queues=self._queues)
            if not waiting:
                return
            self._send(waiting)

    def _send(self, waiting: list[sweeps.Announcement]) -> None:
        sent = []
        try:
            for announcement in waiting:
                if self._is_stopping:
                    break
                ring(self._celery, announcement.job_id, announcement.queue)
                sent.append(announcement)
        finally:
            if sent:
                with self._database.transaction() as session:
                    sweeps.forget_announcements(session, sent)

    def _run(self) -> None:
        while not self._is_stopping:
            self._woken.wait(self._settings.poll_seconds)
            self._woken.clear()
            # However often it is woken: a broker that hangs is not asked for every job.
            if time.monotonic() >= self._resume_at:
                self._guard("ringing", self._try)

    def _try(self) -> None:
        try:
            self.deliver()
        except AppError as error:
            self._resume_at = time.monotonic() + _PATIENCE_SECONDS
            self._complain(error)
        else:
            self._is_silent = False

    def _complain(self, error: AppError) -> None:
        # Once per outage.
        level = logging.DEBUG if self._is_silent else logging.WARNING
        _log.log(level, "%s; workers find the jobs by polling", error)
        self._is_silent = isinstance(error, QueueError)
