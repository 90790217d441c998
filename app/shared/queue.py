"""The broker: a doorbell. A message says that a job waits; whether and by whom it is run is decided in the database.

So messages may be lost or come twice. They carry a job's id and nothing else, are acknowledged at once, and leave no
result.
"""

from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from app.shared.errors import QueueError
from app.shared.settings import Settings

RUN_JOB = "rocket.run_job"
"""Name of the task that `worker` registers; its one argument is the job's id."""

QUEUE = "rocket"

_PING_SECONDS = 0.5


def create_celery(settings: Settings) -> Celery:
    """The Celery application that both sides of the queue use."""
    celery = Celery("rocket", broker=_broker_url(settings), set_as_current=False)
    celery.conf.update(
        task_default_queue=QUEUE,
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


def ring(celery: Celery, job_id: str) -> None:
    """Tells the workers of a job.

    Raises:
        QueueError: the broker does not answer.
    """
    try:
        celery.send_task(RUN_JOB, args=[job_id], queue=QUEUE)
    except OperationalError as error:
        raise QueueError(f"the broker does not answer ({type(error).__name__})") from error


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
    if settings.broker.startswith("memory://"):
        return {"polling_interval": min(1.0, settings.poll_seconds)}
    # Without time limits a broker that hangs, rather than refuses, would block its caller for ever.
    return {
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 30,
        "global_keyprefix": "rocket:",
    }
