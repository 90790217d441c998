"""`rocket worker`: a worker that runs one job at a time; start one for each device."""

import logging
from contextlib import nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli.options import QueueChoice
from rocket_cli.service.server import check_schema, service_settings
from rocket_cli.signals import stopping_on_signals

if TYPE_CHECKING:
    from app.shared.requests import Queue
    from app.shared.settings import Settings


_log = logging.getLogger(__name__)


WorkerQueue = Annotated[
    QueueChoice | None,
    typer.Option("--queue", help="Queue to take jobs from.", show_default="gpu if a CUDA device works, else cpu"),
]


def worker(*, queue: WorkerQueue = None) -> None:
    """Run a worker, which takes jobs from one queue and runs each in its own process.

    On SIGTERM or Ctrl-C a running job keeps its finished layers and returns to the queue. Settings come from ROCKET_
    variables; CUDA_VISIBLE_DEVICES selects this worker's GPU.
    """
    with service_settings() as settings:
        check_schema(settings)
        _work(settings, None if queue is None else queue.value)


def _work(settings: "Settings", queue: "Queue | None") -> None:
    from app.shared.storage import data_folder_lock
    from worker.device import QUEUES, prove_device
    from worker.main import Worker
    from worker.runner import Equipment

    # A signal handler may put an item into it at any point of the main thread.
    requests: SimpleQueue[None] = SimpleQueue()
    working: list[Worker] = []

    def abort() -> None:
        for one in working:
            one.abort()

    # Workers share a data folder, but not with a `rocket serve`, which reclaims every claimed job in its database.
    lock = nullcontext() if settings.database_url else data_folder_lock(settings.data_dir, shared=True)
    with lock, stopping_on_signals(lambda: requests.put(None), abort):
        proof = prove_device(queue, should_stop=lambda: not requests.empty())
        if proof is None:
            return
        chosen = QUEUES[proof.kind]
        working.append(Worker(settings, equipment=Equipment(queues=(chosen,), device=proof.kind)))
        working[0].start()
        device = f"{proof.kind}, {proof.name}" if proof.name else proof.kind
        # The first line of standard output, which scripts read; the log goes to standard error.
        typer.echo(f"Working on queue {chosen} (device {device}), as {working[0].name}")
        requests.get()
        _log.info("stopping; a running job keeps what it has finished")
        working[0].stop()
