import json

import pytest

from app.shared.errors import QueueError
from app.shared.queue import RUN_JOB, create_celery, notify
from app.shared.settings import Settings


def test_a_message_contains_only_the_job_id_as_json():
    celery = create_celery(Settings())
    notify(celery, "job_1", "gpu")
    with celery.connection_for_read() as connection:
        queue = connection.SimpleQueue("rocket.gpu")
        message = queue.get(timeout=5)
        message.ack()
        queue.close()
    assert message.content_type == "application/json"
    assert message.headers["task"] == RUN_JOB
    arguments, keywords, _ = json.loads(message.body)
    assert (arguments, keywords) == (["job_1"], {})


def test_messages_are_acknowledged_early_and_leave_no_result():
    conf = create_celery(Settings()).conf
    assert not conf.task_acks_late
    assert not conf.task_reject_on_worker_lost
    assert conf.worker_prefetch_multiplier == 1
    assert conf.task_ignore_result
    assert conf.result_backend is None
    assert list(conf.accept_content) == ["json"]


def test_redis_has_timeouts_and_memory_a_short_poll():
    redis = create_celery(Settings(broker_url="redis://h")).conf.broker_transport_options
    assert redis["socket_timeout"] <= 5
    assert redis["socket_connect_timeout"] <= 5
    memory = create_celery(Settings(poll_seconds=60)).conf.broker_transport_options
    assert memory["polling_interval"] <= 0.1


@pytest.mark.filterwarnings("ignore")
def test_an_unavailable_broker_has_its_own_error():
    celery = create_celery(Settings(broker_url="redis://127.0.0.1:1/0"))
    celery.conf.task_publish_retry_policy = {"max_retries": 0, "interval_start": 0, "interval_max": 0}
    with pytest.raises(QueueError):
        notify(celery, "job_1", "cpu")
    celery.close()
