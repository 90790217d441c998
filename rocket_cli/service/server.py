"""What the commands that run parts of the service share: settings, schema, address, web server, signals."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli.exit_codes import ExitCode, Failure, report_failure, reported_failures
from rocket_core.errors import InvalidConfigError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from app.shared.settings import Settings

# Open downloads get this long to end once the service is told to stop.
_GRACE_SECONDS = 5

Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; beyond the loopback an API key is needed (`rocket admin keys create`).",
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0 takes a free one.")]


@contextmanager
def service_settings(*, as_json: bool = False, **overrides: object) -> Iterator["Settings"]:
    """The settings, from the environment, with the log set up; errors of the service end the command.

    Args:
        as_json: write errors as JSON too.
        overrides: settings by name that go before the environment.
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


def require_schema(settings: "Settings") -> None:
    """Refuse a database that another version of the code has made, or nobody yet.

    Raises:
        InvalidConfigError: its schema is not that of this version.
        DatabaseUnavailableError: it cannot be reached.
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
        "the database's schema is not that of this version; run `rocket migrate` once, with the same ROCKET_ variables"
    )


def listen(settings: "Settings", host: str, port: int) -> socket.socket:
    """A socket that clients can connect to, if they may: the only place where the service opens one.

    Raises:
        InvalidConfigError: the address is taken, or is none of this machine's.
        InvalidSettingsError: others could reach it, and there is no API key yet.
    """
    from app.services.access import require_safe_binding

    # Before anybody could knock.
    require_safe_binding(settings, host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidConfigError(
            f"cannot listen on {host} port {port}: {_reason(error)}; choose another with --port (0 takes a free one)"
        ) from error


def announce_address(listener: socket.socket) -> None:
    """Print where the service is: the first line of standard output, which scripts read; the log goes elsewhere."""
    host, port = listener.getsockname()[:2]
    typer.echo(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port}")


@contextmanager
def web_server(
    application: "FastAPI", *, on_ready: Callable[[], None], on_abort: Callable[[], None] = lambda: None
) -> Iterator["uvicorn.Server"]:
    """A web server, to be run inside the context: signals end it.

    Args:
        application: what it serves.
        on_ready: called once it answers.
        on_abort: called when somebody does not want to wait for an end in good order.
    """
    server = build_server(application, on_ready)

    def stop() -> None:
        server.should_exit = True
        # Event streams never end by themselves.
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
        """Tells when it is ready, and leaves signals to us: its own handlers end the process before the worker has."""

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

    # Requests are logged by the application, with their ids.
    return Server(
        uvicorn.Config(
            application,
            http=LimitedProtocol,
            loop="asyncio",
            # Done by the application, which knows which proxies to trust.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            server_header=False,
        )
    )


@contextmanager
def stopping_on_signals(stop: Callable[[], None], abort: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the process in good order; whoever sends a second does not want to wait.

    Args:
        stop: called at every signal, in the middle of whatever the main thread does: it must not wait for a lock.
        abort: called before that from the second signal on.
    """
    is_told = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_told
        if is_told:
            abort()
        is_told = True
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(error: OSError) -> str:
    # The exception's own text repeats the address.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
