"""Background thread that publishes queued-job notifications from the outbox.

A broker that hangs can block its caller for a minute. So neither a request nor the sweep of leases talks to it: they
write a notification to the outbox, in the transaction that queues the job, and this thread sends it. What cannot be
sent stays; meanwhile, workers find the jobs by polling.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection

from celery import Celery

from app.shared.database import Database
from app.shared.errors import AppError, QueueError
from app.shared.queue import notify, reachable_queues
from app.shared.repositories import sweeps
from app.shared.requests import Queue
from app.shared.settings import Settings

# Pause between attempts to reach a broker that does not answer.
_RETRY_SECONDS = 5.0
# Longer than a hanging broker blocks its caller, given its timeouts.
_STOP_SECONDS = 10.0
_log = logging.getLogger(__name__)


class OutboxRelay:
    """Sends notifications at once when woken, and those of other processes at intervals.

    Several relays may run at once, one per process: duplicate messages are harmless.

    Args:
        settings: settings of the service.
        database: the database with the outbox.
        celery: the application to send with.
        queues: queues of the worker in this process.
        guard: runs each round, under a name for the log; a worker's catches unexpected errors.
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
        self._queues = reachable_queues(settings, queues)
        self._guard = guard
        self._is_stopping = False
        self._has_warned = False
        self._resume_at = 0.0
        self._woken = threading.Event()
        # A daemon, so that a hanging broker does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Start, unless no worker could receive messages from this process."""
        if self._queues:
            self._thread.start()

    def wake(self) -> None:
        """Make the relay check the outbox at once, without waiting for it."""
        self._woken.set()

    def stop(self) -> None:
        """Stop, and wait for the thread to end, at most some seconds if the broker hangs."""
        self._is_stopping = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def deliver(self) -> None:
        """Send all pending notifications.

        Raises:
            QueueError: the broker does not answer; what was not sent stays.
            DatabaseUnavailableError: the outbox cannot be read.
        """
        while not self._is_stopping:
            with self._database.snapshot() as session:
                waiting = sweeps.list_notifications(session, queues=self._queues)
            if not waiting:
                return
            self._send(waiting)

    def _send(self, waiting: list[sweeps.Notification]) -> None:
        sent = []
        try:
            for notification in waiting:
                if self._is_stopping:
                    break
                notify(self._celery, notification.job_id, notification.queue)
                sent.append(notification)
        finally:
            if sent:
                with self._database.transaction() as session:
                    sweeps.delete_notifications(session, sent)

    def _run(self) -> None:
        while not self._is_stopping:
            self._woken.wait(self._settings.poll_seconds)
            self._woken.clear()
            # However often it is woken, a broker that hangs is not tried for every job.
            if time.monotonic() >= self._resume_at:
                self._guard("notifying workers", self._try)

    def _try(self) -> None:
        try:
            self.deliver()
        except AppError as error:
            self._resume_at = time.monotonic() + _RETRY_SECONDS
            # Warn once per outage.
            level = logging.DEBUG if self._has_warned else logging.WARNING
            _log.log(level, "%s; workers find the jobs by polling", error)
            self._has_warned = isinstance(error, QueueError)
        else:
            self._has_warned = False
