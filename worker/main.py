"""A worker: receives notifications, polls the database, runs jobs, and sweeps the queue."""

import logging
import threading
from collections.abc import Callable, Sequence

from celery.worker import WorkController
from celery.worker import state as celery_state
from prometheus_client import CollectorRegistry

from app.shared.database import Database
from app.shared.metrics import WorkerMetrics, create_registry
from app.shared.queue import create_celery, notify, queue_name
from app.shared.relay import OutboxRelay
from app.shared.repositories import sweeps
from app.shared.settings import Settings
from worker.failures import log_failures
from worker.metrics import MetricsServer
from worker.processes.isolation import check_isolation
from worker.processes.job_processes import FORKED_PROGRAM, JOB_PROGRAM, WarmJobs
from worker.reconciler import Reconciler
from worker.runner import ALL_ROUND, Equipment, Runner, job_environment
from worker.tasks import register_tasks
from worker.webhooks import AT_ONCE, WebhookSender

_CONSUMER_STOP_SECONDS = 10.0
_log = logging.getLogger(__name__)


class Worker:
    """All threads of one worker. It needs only the database; the broker makes it react faster.

    Args:
        settings: settings of the service; the database must be migrated.
        program: interpreter arguments of a job's process.
        equipment: which jobs it takes.
        registry: registry for its metrics, for a process that serves them together with others; None creates one, and
            serves it on the metrics port of the settings, if set.
    """

    def __init__(
        self,
        settings: Settings,
        program: Sequence[str] = JOB_PROGRAM,
        equipment: Equipment = ALL_ROUND,
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._settings = settings
        self._queues = equipment.queues
        self._database = Database(settings.database)
        self._celery = create_celery(settings)
        self._serves_metrics = registry is None and settings.metrics_port is not None
        self._registry = create_registry() if registry is None else registry
        self._metrics_server: MetricsServer | None = None
        metrics = WorkerMetrics(self._registry)
        # Other programs than that of a job cannot be forked.
        is_warm = settings.preload_library and tuple(program) == FORKED_PROGRAM and WarmJobs.is_supported()
        processes = WarmJobs(job_environment(settings, equipment)) if is_warm else None
        self._runner = Runner(settings, self._database, program, equipment, metrics=metrics, processes=processes)
        self._reconciler = Reconciler(settings, self._database, metrics=metrics)
        self._relay = OutboxRelay(settings, self._database, self._celery, queues=self._queues, guard=log_failures)
        register_tasks(self._celery, self._runner)
        self._stopped = threading.Event()
        sender = WebhookSender(settings, self._database, self._stopped)
        self._threads = [
            *(
                threading.Thread(target=self._repeat, args=("sending webhooks", sender.send_due), name=f"webhooks-{n}")
                for n in range(AT_ONCE)
            ),
            threading.Thread(target=self._repeat, args=("looking for jobs", self._run_waiting_jobs), name="poller"),
            threading.Thread(target=self._repeat, args=("sweeping", self._reconciler.sweep), name="reconciler"),
        ]
        self._consumer = threading.Thread(
            target=self._repeat, args=("hearing messages", self._consume), name="consumer", daemon=True
        )

    @property
    def name(self) -> str:
        """Unique name under which it claims jobs."""
        return self._runner.name

    def wake_relay(self) -> None:
        """Make the relay notify workers of queued jobs immediately, without waiting for it."""
        self._relay.wake()

    def reclaim_all(self) -> None:
        """Reclaim every claimed job, for a service without any other worker."""
        while True:
            with self._database.transaction() as session:
                reclaimed = sweeps.reclaim_claimed(session)
            if not reclaimed:
                return
            for job_id in reclaimed:
                _log.info("reclaimed from a service that has died", extra={"job_id": job_id})

    def start(self) -> None:
        """Start all threads and return.

        Raises:
            InvalidSettingsError: the metrics port is not available, or jobs cannot be confined as required; no
            thread is started then.
        """
        check_isolation(self._settings)
        if self._serves_metrics:
            self._metrics_server = MetricsServer(self._settings, self._registry)
            _log.info("metrics are served", extra={"port": self._metrics_server.port})
        self._runner.prepare()
        self._consumer.start()
        self._relay.start()
        for thread in self._threads:
            thread.start()

    def abort(self) -> None:
        """Kill the running job, instead of waiting for it with `stop`."""
        self._runner.abort()

    def stop(self) -> None:
        """Make the running job save a checkpoint, release it, and wait until all threads have ended."""
        self._runner.stop()
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._runner.close()
        self._relay.stop()
        # This is how Celery stops a consumer from another thread.
        celery_state.should_stop = 0
        self._wake_consumer()
        self._consumer.join(self._settings.cancel_grace_seconds + _CONSUMER_STOP_SECONDS)
        celery_state.should_stop = None
        if self._metrics_server is not None:
            self._metrics_server.close()
        self._database.close()

    def _wake_consumer(self) -> None:
        # The consumer waits up to two seconds for a message before it checks the flag, and once more before it stops.
        if self._settings.broker.startswith("memory://"):
            for _ in range(2):
                log_failures("stopping", lambda: notify(self._celery, "", self._queues[0]))

    def _consume(self) -> None:
        # The threads of its pool look for tasks in the default app. It is global, and a process has only one worker.
        self._celery.set_default()
        # A pool of one thread: a process pool forks, which neither torch nor our threads survive.
        controller = WorkController(
            app=self._celery,
            # Two workers of one machine must not have the same name.
            hostname="@".join(reversed(self.name.split(":"))),
            queues=[queue_name(queue) for queue in self._queues],
            pool="threads",
            concurrency=1,
            without_mingle=True,
            without_gossip=True,
            without_heartbeat=True,
        )
        controller.start()

    def _run_waiting_jobs(self) -> None:
        while self._runner.run() or self._runner.help():
            pass

    def _repeat(self, what: str, action: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            log_failures(what, action)
            self._stopped.wait(self._settings.poll_seconds)
