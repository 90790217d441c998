import socket
import threading
import time
from collections import Counter

import pytest

from app.shared.database import Database
from app.shared.queue import create_celery, queue_name
from app.shared.relay import OutboxRelay
from app.shared.repositories import sweeps
from app.shared.requests import JobRequest
from app.shared.settings import Settings

REQUEST = {"model_id": "local/tiny", "ratio": 0.3}


@pytest.fixture
def celery():
    celery = create_celery(Settings())
    yield celery
    celery.close()


@pytest.fixture
def heard(celery):
    """Return the messages that wait for workers, by queue."""

    def heard():
        found = []
        with celery.connection_for_read() as connection:
            for name in ("cpu", "gpu"):
                queue = connection.SimpleQueue(queue_name(name))
                while queue.qsize():
                    message = queue.get(block=False)
                    message.ack()
                    found.append((message.payload[0][0], name))
                queue.close()
        return found

    heard()
    return heard


@pytest.fixture
def waiting(database):
    def waiting():
        with database.snapshot() as session:
            return [row.job_id for row in sweeps.list_notifications(session)]

    return waiting


@pytest.fixture
def relay(database, celery):
    """Start relays."""
    relays = []

    def relay(queues=("cpu", "gpu"), *, celery=celery, **settings):
        relays.append(OutboxRelay(Settings(poll_seconds=60, **settings), database, celery, queues=queues))
        relays[-1].start()
        return relays[-1]

    yield relay
    for one in relays:
        one.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "relay"]


def eventually(condition):
    until = time.monotonic() + 20
    while not (answer := condition()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return answer


def test_a_woken_relay_notifies_the_queue_of_each_job_once(relay, submit, heard, waiting):
    started = relay()
    for_cpu, for_gpu = submit(), submit(JobRequest(**REQUEST, queue="gpu"))
    # Without a wake-up it would look in a minute.
    started.wake()
    assert Counter(eventually(lambda: waiting() == [] and heard())) == Counter([(for_cpu, "cpu"), (for_gpu, "gpu")])
    started.wake()
    time.sleep(0.2)
    assert heard() == []


def test_jobs_of_other_queues_are_left_to_other_processes(relay, submit, heard, waiting):
    for_cpu, for_gpu = submit(), submit(JobRequest(**REQUEST, queue="gpu"))
    relay(queues=()).wake()
    relay(queues=("cpu",)).wake()
    assert eventually(heard) == [(for_cpu, "cpu")]
    assert eventually(lambda: waiting() == [for_gpu])


def test_a_queue_without_workers_is_not_notified_for_ever(relay, submit, heard, waiting, monkeypatch):
    monkeypatch.setattr("app.shared.queue._MOST_MESSAGES", 3)
    for _ in range(8):
        submit()
    relay().wake()
    eventually(lambda: waiting() == [])
    assert len(heard()) == 3


@pytest.mark.parametrize("broker", ["refuses", "hangs"])
def test_silent_broker_blocks_and_loses_nothing(relay, submit, waiting, broker, caplog):
    job_ids = [submit() for _ in range(3)]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if broker == "hangs":
            server.listen(100)
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        celery = create_celery(Settings(broker_url=url))
        started = relay(celery=celery, broker_url=url)
        began = time.monotonic()
        for _ in range(100):
            started.wake()
        assert time.monotonic() - began < 0.5
        eventually(lambda: "polling" in caplog.text)
        assert waiting() == job_ids
        # Once per outage, and not once per job.
        assert caplog.text.count("polling") == 1
        began = time.monotonic()
        started.stop()
        assert time.monotonic() - began < 10
        celery.close()


def test_two_relays_lose_no_announcement(database_url, clock, submit, heard, waiting, celery, relay):
    job_ids = [submit() for _ in range(120)]
    other = Database(database_url, clock=clock)
    relay().wake()
    second = OutboxRelay(Settings(poll_seconds=60), other, celery, queues=("cpu",))
    second.deliver()
    eventually(lambda: waiting() == [])
    assert {job_id for job_id, _ in heard()} == set(job_ids)
    other.close()
