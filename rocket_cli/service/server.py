"""Shared parts of the commands that run the service: settings, schema, address and web server."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.exit_codes import Failure, report_failure, reported_failures
from rocket_cli.signals import stopping_on_signals
from rocket_core.errors import ExitCode, InvalidConfigError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from app.shared.settings import Settings

# Time for open downloads to complete once the service is asked to stop.
_GRACE_SECONDS = 5

Host = Annotated[
    str,
    options.option(
        "ADDRESS", "Address to listen on; any other than loopback requires an API key (`rocket admin keys create`)."
    ),
]
Port = Annotated[int, options.option("N", "Port to listen on; 0 picks a free one.", min=0, max=65535)]


@contextmanager
def service_settings(*, as_json: bool = False, **overrides: object) -> Iterator["Settings"]:
    """Configure the log, and yield the settings from the environment; errors of the service end the command.

    Args:
        as_json: whether to write errors as JSON too.
        overrides: settings by name that take precedence over the environment.
    """
    from app.shared.errors import AppError
    from app.shared.logging import configure_logging, log_uncaught_errors
    from app.shared.settings import load_settings

    with reported_failures(as_json=as_json):
        try:
            settings = load_settings(**overrides)
            configure_logging(settings)
            log_uncaught_errors()
            yield settings
        except AppError as error:
            exit_code = ExitCode.TEMPORARY if error.retryable else ExitCode.INVALID
            report_failure(Failure(code=error.code, message=str(error), exit_code=exit_code), as_json=as_json)
            raise typer.Exit(exit_code) from error


def check_schema(settings: "Settings") -> None:
    """Raise an error unless the database exists and has this version's schema.

    Raises:
        InvalidConfigError: the schema is not that of this version.
        DatabaseUnavailableError: the database cannot be reached.
    """
    from app.shared.database import Database

    url = settings.database
    is_there = url.get_backend_name() != "sqlite" or Path(str(url.database)).is_file()
    database = Database(url)
    try:
        if is_there and database.is_current():
            return
    finally:
        database.close()
    raise InvalidConfigError(
        "the database does not have the schema of this version; run `rocket migrate` once, with the same "
        "ROCKET_ variables"
    )


def listen(settings: "Settings", host: str, port: int) -> socket.socket:
    """Return a listening socket, if the address is allowed; the service opens sockets only here.

    Raises:
        InvalidConfigError: the address is in use, or not an address of this machine.
        InvalidSettingsError: other machines could reach the service, and there is no API key yet.
    """
    from app.services.access import check_safe_binding

    # Checked before any client can connect.
    check_safe_binding(settings, host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        # The exception's own text repeats the address.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InvalidConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port (0 picks a free one)"
        ) from error


def announce_address(listener: socket.socket) -> None:
    """Print the address of the service as the first line of standard output, which scripts read."""
    host, port = listener.getsockname()[:2]
    typer.echo(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port}")


@contextmanager
def web_server(
    application: "FastAPI", *, on_ready: Callable[[], None], on_abort: Callable[[], None] = lambda: None
) -> Iterator["uvicorn.Server"]:
    """Yield a web server to run in the context, in which signals stop it.

    Args:
        application: the application to serve.
        on_ready: called once it answers requests.
        on_abort: called on every signal after the first, to skip the orderly shutdown.
    """
    server = build_server(application, on_ready)

    def stop() -> None:
        server.should_exit = True
        # Event streams do not end by themselves.
        application.state.streams.close()

    def abort() -> None:
        server.force_exit = True
        on_abort()

    with stopping_on_signals(stop, abort):
        yield server


def build_server(application: "FastAPI", on_ready: Callable[[], None]) -> "uvicorn.Server":
    """Build a web server for `listen`'s sockets, without signal handlers."""
    import uvicorn

    from rocket_cli.service.acceptor import Acceptor
    from rocket_cli.service.connections import LimitedProtocol, LimitedState, choose_limits

    settings: Settings = application.state.context.settings

    class Server(uvicorn.Server):
        """A server that calls `on_ready`, without uvicorn's signal handlers, which end the process too early."""

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self.server_state: LimitedState = LimitedState(choose_limits(settings))
            self._acceptors: list[Acceptor] = []

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            self._acceptors = [Acceptor(listener, self.server_state, self._protocol) for listener in sockets or ()]
            on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for acceptor in self._acceptors:
                acceptor.close()
            await super().shutdown(sockets)

        def _protocol(self) -> LimitedProtocol:
            return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    # The application logs requests, with their ids.
    return Server(
        uvicorn.Config(
            application,
            http=LimitedProtocol,
            loop="asyncio",
            # The application handles these headers, as it knows which proxies to trust.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            server_header=False,
        )
    )
