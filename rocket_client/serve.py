"""`rocket serve`: API, worker and reconciler in one process, with SQLite and no other server."""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_client.failures import ExitCode, Failure, report_failure, reported_failures
from rocket_core.errors import InvalidConfigError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from app.api.events import Streams
    from app.shared.settings import Settings
    from worker.main import Worker

NAME = "serve"

# Open downloads get this long to end once the service is told to stop.
_GRACE_SECONDS = 5
_log = logging.getLogger(__name__)

Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; beyond the loopback an API key is needed (`rocket admin keys create`).",
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0 takes a free one.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder for everything the service writes.", show_default="ROCKET_DATA_DIR or ./rocket-data"
    ),
]


def serve(*, host: Host = "127.0.0.1", port: Port = 8000, data_dir: DataDir = None) -> None:
    """Run the service, all in one process.

    Ctrl-C has a running job keep what it has finished and put itself back into the queue; the next start goes on.
    """
    from app.shared.errors import AppError
    from app.shared.logging import configure_logging, log_uncaught_errors
    from app.shared.settings import load_settings

    with reported_failures(as_json=False):
        try:
            settings = load_settings(**({} if data_dir is None else {"data_dir": data_dir}))
            configure_logging(settings)
            log_uncaught_errors()
            _serve(settings, host, port)
        except AppError as error:
            exit_code = ExitCode.TEMPORARY if error.retryable else ExitCode.INVALID
            report_failure(Failure(code=error.code, message=str(error), exit_code=exit_code), as_json=False)
            raise typer.Exit(exit_code) from error


def _serve(settings: "Settings", host: str, port: int) -> None:
    from app.main import create_app
    from app.services.access import require_safe_binding
    from app.shared.database import upgrade
    from app.shared.metrics import create_registry
    from app.shared.storage import data_folder_lock
    from worker.main import Worker

    with data_folder_lock(settings.data_dir):
        for folder in (settings.models_folder, settings.datasets_folder):
            folder.mkdir(parents=True, exist_ok=True)
        upgrade(settings.database)
        # Before anybody could knock.
        require_safe_binding(settings, host)
        with _listen(host, port) as listener:
            registry = create_registry()
            worker = Worker(settings, registry=registry)
            if settings.database_url is None:
                # Behind the lock on the folder that holds the database, nobody else can have a job.
                worker.reclaim_all()
            application = create_app(settings, registry=registry, address=host)
            server = _server(application, on_ready=lambda: _announce(settings, listener))
            with _stopping_on_signals(server, application.state.streams, worker):
                worker.start()
                try:
                    server.run(sockets=[listener])
                finally:
                    _log.info("stopping; a running job keeps what it has finished")
                    worker.stop()


def _server(application: "FastAPI", *, on_ready: Callable[[], None]) -> "uvicorn.Server":
    import uvicorn

    class Server(uvicorn.Server):
        """Tells when it is ready, and leaves signals to us: its own handlers end the process before the worker has."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    # Requests are logged by the application, with their ids.
    return Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            server_header=False,
        )
    )


@contextmanager
def _stopping_on_signals(server: "uvicorn.Server", streams: "Streams", worker: "Worker") -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the service in good order; whoever sends a second does not want to wait."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        if server.should_exit:
            server.force_exit = True
            worker.abort()
        server.should_exit = True
        # Event streams never end by themselves.
        streams.close()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(settings: "Settings", listener: socket.socket) -> None:
    from app.shared.catalog import list_models

    host, port = listener.getsockname()[:2]
    # The first line of standard output, which scripts read; the log goes to standard error.
    typer.echo(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port}")
    typer.echo(f"Data in {settings.data_dir}")
    models = list_models(settings)
    typer.echo(f"Models in {settings.models_folder}: {', '.join(models) or 'none yet'}")
    typer.echo("Ctrl-C stops the service; a running job goes on at the next start")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidConfigError(
            f"cannot listen on {host} port {port}: {_reason(error)}; choose another with --port (0 takes a free one)"
        ) from error


def _reason(error: OSError) -> str:
    # The exception's own text repeats the address.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
