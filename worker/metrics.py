"""Metrics of a worker, and the server that exposes them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from app.shared.database import Database
from app.shared.errors import AppError, InvalidSettingsError
from app.shared.metrics import WorkerMetrics
from app.shared.repositories.leases import Lease
from app.shared.repositories.statistics import read_attempt
from app.shared.settings import Settings


@contextmanager
def measured_attempt(database: Database, metrics: WorkerMetrics, lease: Lease) -> Iterator[None]:
    """Count an attempt, which lasts as long as the context, by its job's events: a killed process reports nothing."""
    metrics.begin_attempt()
    record = None
    try:
        yield
        # An unavailable database costs one data point and nothing else.
        with suppress(AppError), database.snapshot() as session:
            record = read_attempt(session, lease.job_id, after=lease.claim_event)
    finally:
        metrics.end_attempt(record)


class MetricsServer:
    """Server for the metrics of a worker in its own process, on `ROCKET_METRICS_PORT`.

    Args:
        settings: address and port.
        registry: the metrics.

    Raises:
        InvalidSettingsError: the address or the port is not available.
    """

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        assert settings.metrics_port is not None
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(
                settings.metrics_port, addr=settings.metrics_host, registry=registry
            )
        except OSError as error:
            raise InvalidSettingsError(
                f"the metrics of this worker cannot be served ({error.strerror}); choose another ROCKET_METRICS_PORT, "
                "or an address of this machine as ROCKET_METRICS_HOST"
            ) from error

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
