"""The broker. Celery is used only to notify workers of queued jobs; the database decides which worker runs a job.

So messages may be lost or duplicated. They contain only a job's id, are acknowledged at once, and leave no result.
"""

from collections.abc import Collection
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from app.shared.errors import QueueError
from app.shared.requests import QUEUES, Queue
from app.shared.settings import Settings

RUN_JOB = "rocket.run_job"
"""Name of the task that `worker` registers; its only argument is the job's id."""

# With so many messages waiting, further ones are pointless: no worker is listening, or those that are have enough work.
_MOST_MESSAGES = 1000
# Polling interval for messages within one process, in seconds; polling costs nothing there.
_MEMORY_POLL_SECONDS = 0.1

_PING_SECONDS = 0.5


def create_celery(settings: Settings) -> Celery:
    """Return the Celery application that both sides of the queue use."""
    celery = Celery("rocket", broker=_broker_url(settings), set_as_current=False)
    celery.conf.update(
        task_default_queue=queue_name("cpu"),
        # JSON only: unpickling a message would execute untrusted code.
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        # Acknowledged on arrival: the database requeues a lost job, long before a broker would.
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
    """Return the broker's name of a queue."""
    return f"rocket.{queue}"


def reachable_queues(settings: Settings, queues: Collection[Queue]) -> Collection[Queue]:
    """Return the queues whose messages from this process can reach a worker.

    Args:
        settings: settings of the service.
        queues: queues of the worker in this process; empty without one.
    """
    # Messages in memory do not leave the process, and would pile up without a worker.
    return queues if _is_memory(settings) else QUEUES


def notify(celery: Celery, job_id: str, queue: Queue) -> None:
    """Notify the workers of a queue of a job; takes up to a minute if the broker hangs.

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
    """Return in words whether the broker answers; may take as long as resolving its name."""
    if _is_memory(settings):
        return "in this process"
    celery = create_celery(settings)
    options = {**_transport_options(settings), "socket_timeout": _PING_SECONDS, "socket_connect_timeout": _PING_SECONDS}
    connection = celery.connection_for_write(transport_options=options)
    try:
        # Called directly, as the library would retry repeatedly.
        connection.transport.establish_connection()
    except connection.connection_errors as error:
        return f"unreachable ({type(error).__name__}); workers poll"
    finally:
        connection.release()
        celery.close()
    return "ok"


def _broker_url(settings: Settings) -> str:
    # Without a host, the library warns that one is missing, although none is needed.
    return "memory://localhost/" if settings.broker == "memory://" else settings.broker


def _transport_options(settings: Settings) -> dict[str, Any]:
    if _is_memory(settings):
        return {"polling_interval": _MEMORY_POLL_SECONDS}
    # Without timeouts, a broker that hangs would block its caller forever.
    return {
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 30,
        "global_keyprefix": "rocket:",
    }
