"""`rocket serve`: API, worker and reconciler in one process, with SQLite and without other servers."""

import functools
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocket_cli import options
from rocket_cli.service.sample import create_models_folder
from rocket_cli.service.server import Host, Port, announce_address, listen, service_settings, web_server
from rocket_core.system.gc_pause import no_collection

if TYPE_CHECKING:
    from app.shared.settings import Settings


_log = logging.getLogger(__name__)

DataDir = Annotated[
    Path | None, options.option("DIR", "Folder for everything the service writes.", "ROCKET_DATA_DIR or ./rocket-data")
]


def serve(*, host: Host = "127.0.0.1", port: Port = 8000, data_dir: DataDir = None) -> None:
    """Run the service in one process.

    On Ctrl-C a running job keeps its finished layers and returns to the queue; it resumes at the next start.
    """
    overrides: dict[str, Any] = {} if data_dir is None else {"data_dir": data_dir}
    with service_settings(**overrides) as settings:
        _serve(settings, host, port)


def _serve(settings: "Settings", host: str, port: int) -> None:
    with no_collection(lasting=True):
        from app.main import create_app
        from app.shared.database import upgrade
        from app.shared.metrics import create_registry
        from app.shared.storage import data_folder_lock
        from worker.main import Worker

    with data_folder_lock(settings.data_dir):
        upgrade(settings.database)
        with listen(settings, host, port) as listener:
            create_models_folder(settings.models_folder)
            settings.datasets_folder.mkdir(parents=True, exist_ok=True)
            registry = create_registry()
            worker = Worker(settings, registry=registry)
            if settings.database_url is None:
                # The folder that contains the database is locked, so no other worker can have a job.
                worker.reclaim_all()
            application = create_app(settings, registry=registry, address=host, on_queued=worker.wake_relay)
            ready = functools.partial(_announce, settings, listener)
            with web_server(application, on_ready=ready, on_abort=worker.abort) as server:
                worker.start()
                try:
                    server.run(sockets=[listener])
                finally:
                    _log.info("stopping; a running job keeps what it has finished")
                    worker.stop()


def _announce(settings: "Settings", listener: socket.socket) -> None:
    from app.shared.catalog import list_models

    announce_address(listener)
    typer.echo(f"Data in {settings.data_dir}")
    models = list_models(settings)
    typer.echo(f"Models in {settings.models_folder}: {', '.join(models) or 'none yet'}")
    typer.echo("Ctrl-C stops the service; a running job resumes at the next start")
