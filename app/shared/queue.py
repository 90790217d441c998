"""The broker: a doorbell. A message says that a job waits; whether and by whom it is run is decided in the database.

So messages may be lost or come twice. They carry a job's id and nothing else, are acknowledged at once, and leave no
result.
"""

from collections.abc import Collection
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from app.shared.errors import QueueError
from app.shared.requests import QUEUES, Queue
from app.shared.settings import Settings

RUN_JOB = "rocket.run_job"
"""Name of the task that `worker` registers; its one argument is the job's id."""

# A doorbell that has been rung so often says no more for being rung again: nobody hears it, or whoever does has enough.
_MOST_MESSAGES = 1000
# How soon a message is heard that is sent inside one process; looking costs nothing there.
_MEMORY_POLL_SECONDS = 0.1

_PING_SECONDS = 0.5


def create_celery(settings: Settings) -> Celery:
    """The Celery application that both sides of the queue use."""
    celery = Celery("rocket", broker=_broker_url(settings), set_as_current=False)
    celery.conf.update(
        task_default_queue=queue_name("cpu"),
        # JSON only: a pickled message is code that somebody else chose.
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        # Acknowledged on arrival: the database hands a lost job out again, and long before a broker would.
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options=_transport_options(settings),
    )
    return celery


def queue_name(queue: Queue) -> str:
    """What the broker calls a queue."""
    return f"rocket.{queue}"


def audible_queues(settings: Settings, queues: Collection[Queue]) -> Collection[Queue]:
    """Queues into which a process may send messages that somebody hears.

    Args:
        settings: of the service.
        queues: those that the process's own worker hears; none if it has no worker.
    """
    # Messages in memory reach nobody outside the process, and would pile up.
    return queues if _is_memory(settings) else QUEUES


def ring(celery: Celery, job_id: str, queue: Queue) -> None:
    """Tells the workers of a queue of a job; may take a minute where a broker hangs.

    Raises:
        QueueError: the broker does not answer.
    """
    name = queue_name(queue)
    with celery.producer_or_acquire() as producer:
        connection = producer.connection
        try:
            waiting = connection.default_channel.queue_declare(queue=name).message_count
            if waiting < _MOST_MESSAGES:
                celery.send_task(RUN_JOB, args=[job_id], queue=name, producer=producer)
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
            raise QueueError(f"the broker does not answer ({type(error).__name__})") from error


def _is_memory(settings: Settings) -> bool:
    return settings.broker.startswith("memory://")


def broker_state(settings: Settings) -> str:
    """Whether the broker answers, in words; it may take as long as resolving its name does."""
    if settings.broker.startswith("memory://"):
        return "in this process"
    celery = create_celery(settings)
    options = {**_transport_options(settings), "socket_timeout": _PING_SECONDS, "socket_connect_timeout": _PING_SECONDS}
    connection = celery.connection_for_write(transport_options=options)
    try:
        # By hand, as the library would try again and again.
        connection.transport.establish_connection()
    except connection.connection_errors as error:
        return f"unreachable ({type(error).__name__}); workers poll"
    finally:
        connection.release()
        celery.close()
    return "ok"


def _broker_url(settings: Settings) -> str:
    # Without a host the library warns of one that is missing, though there is none to name.
    return "memory://localhost/" if settings.broker == "memory://" else settings.broker


def _transport_options(settings: Settings) -> dict[str, Any]:
    if _is_memory(settings):
        return {"polling_interval": _MEMORY_POLL_SECONDS}
    # Without time limits a broker that hangs, rather than refuses, would block its caller for ever.
    return {
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 30,
        "global_keyprefix": "rocket:",
    }
