"""Metrics of the whole service, the same in every process: read from the database at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.services.context import Context
from app.services.timed_check import TimedCheck
from app.shared.errors import AppError
from app.shared.lifecycle import Status
from app.shared.repositories.statistics import Statistics, read_statistics
from app.shared.requests import QUEUES

# Upper bound on the time that a hanging database delays a scrape; the process's own metrics are always returned.
_SECONDS = 2.0
_ACTIVE = tuple(str(status) for status in Status if not status.is_terminal)


class ServiceCollector(Collector):
    """Collector of figures from the database, and of whether the database answers.

    Args:
        context: the service.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._check = TimedCheck(self._read)

    def describe(self) -> list[Metric]:
        """Return nothing: without this method the library would query the database for the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all figures as of one moment; if the database does not answer, only that fact."""
        statistics = self._check.ask(_SECONDS)
        is_up = float(statistics is not None)
        yield GaugeMetricFamily("rocket_database_up", "Whether the database answered this scrape.", value=is_up)
        if statistics is not None:
            yield from _families(statistics)

    def _read(self) -> Statistics | None:
        try:
            with self._context.database.snapshot() as session:
                return read_statistics(session, lease_seconds=self._context.settings.lease_seconds)
        except AppError:
            return None


def _families(statistics: Statistics) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("rocket_jobs", "Jobs that have not ended.", labels=("queue", "status"))
    waiting = GaugeMetricFamily(
        "rocket_oldest_queued_seconds", "Time since the longest waiting job became available.", labels=("queue",)
    )
    silent = GaugeMetricFamily(
        "rocket_longest_silence_seconds", "Longest time since a running job's lease was renewed.", labels=("queue",)
    )
    # Also for zero, so that an alert can tell zero from a service that does not answer.
    for queue in QUEUES:
        for status in _ACTIVE:
            jobs.add_metric((queue, status), statistics.active_jobs.get((queue, status), 0))
        waiting.add_metric((queue,), statistics.waiting_seconds.get(queue, 0))
        silent.add_metric((queue,), statistics.silent_seconds.get(queue, 0))
    stored = GaugeMetricFamily("rocket_stored_bytes", "Size of the files in the store.", labels=("kind",))
    stored.add_metric(("artifacts",), statistics.artifact_bytes)
    stored.add_metric(("uploads",), statistics.upload_bytes)
    yield from (jobs, waiting, silent, stored)
    unsent = "Notifications of queued jobs that the broker has not received yet."
    yield GaugeMetricFamily("rocket_outbox_rows", unsent, value=statistics.unsent_notifications)
