"""Prometheus metrics of the service's processes: every name, its meaning and its labels.

Counters are in a registry that is created for an application or a worker and passed to it, not in the library's global
one: `rocket serve` passes one to both, and tests can have several services. Figures of all processes together, such as
the length of the queue, are read from the database when requested, see `app/services/metrics`.

No label has a value that a client chose: no path, no model, no tenant, no job.
"""

from dataclasses import dataclass
from datetime import timedelta

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, PlatformCollector
from prometheus_client import ProcessCollector as _ProcessCollector

_MINUTE, _HOUR = 60.0, 3600.0
_LONG = (_HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR, 24 * _HOUR)
_STAGE_SECONDS = (1.0, 5.0, 15.0, _MINUTE, 5 * _MINUTE, 15 * _MINUTE, *_LONG)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

OUTCOMES = ("succeeded", "failed", "queued", "cancelled", "released", "lost", "unknown")
"""How an attempt ends: `queued` after a retryable error, `released` when its worker was told to stop, `lost` when the
job was taken from its worker, `unknown` when the database could not be queried."""


def create_registry() -> CollectorRegistry:
    """Return a registry with metrics of the process: memory, processor time, open files, Python."""
    registry = CollectorRegistry()
    for collector in (_ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class HttpMetrics:
    """Metrics of a process that serves the API.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "rocket_http_requests", "HTTP responses sent.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "rocket_http_request_seconds",
            "Time until the response started.",
            ("method", "route"),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )

    def count_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `route` is a template such as `/jobs/{job_id}`, never a path."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """The record of an attempt that has ended.

    Attributes:
        outcome: one of `OUTCOMES`.
        stages: the stages that it finished, with their durations.
        published_bytes: size of the artifacts that it published.
    """

    outcome: str
    stages: tuple[tuple[str, timedelta], ...]
    published_bytes: int


class WorkerMetrics:
    """Metrics of a process that runs jobs.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter("rocket_attempts_started", "Attempts started.", registry=registry)
        self._ended = Counter("rocket_attempts_ended", "Attempts ended.", ("outcome",), registry=registry)
        self._stages = Histogram(
            "rocket_stage_seconds",
            "Duration of each finished stage of an attempt.",
            ("stage",),
            buckets=_STAGE_SECONDS,
            registry=registry,
        )
        self._bytes = Counter("rocket_published_bytes", "Size of the artifacts published.", registry=registry)
        self._lost = Counter(
            "rocket_leases_lost",
            "Leases lost without a release: reclaimed by this reconciler, or found lost by this worker.",
            ("noticed_by",),
            registry=registry,
        )
        self._running = Gauge("rocket_jobs_running", "Jobs that this worker is running.", registry=registry)
        self._swept = Gauge(
            "rocket_last_sweep_timestamp_seconds",
            "When this worker last completed a sweep of the queue.",
            registry=registry,
        )
        # Initialized, so that an alert on their increase notices the first one.
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        for witness in ("reconciler", "worker"):
            self._lost.labels(witness)

    def begin_attempt(self) -> None:
        """Count a started attempt."""
        self._started.inc()
        self._running.inc()

    def end_attempt(self, record: AttemptRecord | None) -> None:
        """Count an ended attempt; None if its outcome is not known."""
        self._running.dec()
        if record is None:
            self._ended.labels("unknown").inc()
            return
        self._ended.labels(record.outcome).inc()
        self._bytes.inc(record.published_bytes)
        for stage, duration in record.stages:
            self._stages.labels(stage).observe(duration.total_seconds())
        if record.outcome == "lost":
            self._lost.labels("worker").inc()

    def count_reclaimed(self, jobs: int) -> None:
        """Count jobs taken from workers that no longer report."""
        self._lost.labels("reconciler").inc(jobs)

    def note_sweep(self) -> None:
        """Record the time of a completed sweep of the queue."""
        self._swept.set_to_current_time()
