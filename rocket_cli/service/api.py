"""`rocket api`: the API alone, for a service with separate worker processes."""

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rocket_cli.service.server import Host, Port, announce_address, check_schema, listen, service_settings, web_server
from rocket_core.system.gc_pause import no_collection

if TYPE_CHECKING:
    from app.shared.settings import Settings


def api(*, host: Host = "127.0.0.1", port: Port = 8000) -> None:
    """Run the API; `rocket worker` runs the jobs.

    Several processes may share one database. Settings come from ROCKET_ variables.
    """
    with service_settings() as settings:
        check_schema(settings)
        _serve(settings, host, port)


def _serve(settings: "Settings", host: str, port: int) -> None:
    with no_collection(lasting=True):
        from app.main import create_app
        from app.shared.database import Database
        from app.shared.queue import create_celery
        from app.shared.relay import OutboxRelay
        from app.shared.storage import data_folder_lock

    # `rocket serve` has exclusive use of its data folder, and of the database in it.
    lock = nullcontext() if settings.database_url else data_folder_lock(settings.data_dir, shared=True)
    with lock, listen(settings, host, port) as listener:
        database = Database(settings.database)
        relay = OutboxRelay(settings, database, create_celery(settings))
        application = create_app(settings, address=host, on_queued=relay.wake)
        with web_server(application, on_ready=functools.partial(announce_address, listener)) as server:
            relay.start()
            try:
                server.run(sockets=[listener])
            finally:
                relay.stop()
                database.close()
