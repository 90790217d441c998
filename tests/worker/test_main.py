import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from celery.signals import worker_init
from celery.worker import state as celery_state
from sqlalchemy import text

from app.shared.queue import create_celery, notify, queue_name
from tests.sampling import sweep
from tests.servers import Redis
from tests.worker.waiting import eventually
from worker.main import Worker
from worker.runner import ALL_ROUND, Equipment

FOREVER = "while True: time.sleep(1)"


@pytest.fixture
def start_worker():
    """Start workers, and stop those that the test has not stopped."""
    workers = []

    def start_worker(settings, program, equipment=ALL_ROUND):
        workers.append(Worker(settings, program, equipment))
        workers[-1].start()
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.abort()
        worker.stop()


@pytest.fixture
def closed_port():
    """Yield a port of this machine on which no process answers during the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def silent_port():
    """Yield a port of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


@pytest.fixture
def statuses(look):
    def statuses(job_ids):
        return Counter(look(job_id).status for job_id in job_ids)

    return statuses


def test_messages_start_jobs_without_waiting_for_the_poll(configure, start_worker, program, diary, submit, statuses):
    # The only poll within a minute, and the only sweep, are at the start.
    settings = configure(poll_seconds=60)
    start_worker(settings, program(diary.note("sys.argv[1]") + "\ntime.sleep(0.1)"))
    celery = create_celery(settings)
    job_ids = []

    def have_ended():
        return statuses(job_ids) == {"failed": len(job_ids)}

    for number in (1, 3):
        # Several wait for each other.
        notified = [submit(max_attempts=1) for _ in range(number)]
        job_ids.extend(notified)
        for job_id in notified:
            notify(celery, job_id, "cpu")
        eventually(have_ended)
    assert sorted(diary.read()) == sorted(job_ids)
    celery.close()


def test_a_repeated_message_runs_its_job_once(configure, start_worker, program, diary, submit, look):
    settings = configure()
    # Fails permanently, with attempts left that another run could use.
    code = f"""
    from app.shared.database import Database
    from app.shared.outcomes import JobError
    from app.shared.repositories import leases
    from app.shared.settings import load_settings
    {diary.note("sys.argv[1]")}
    time.sleep(0.5)
    with Database(load_settings().database).transaction() as session:
        leases.fail_job(session, leases.Lease(job_id=sys.argv[1], fence=sys.argv[2]), JobError(code="x", message="m"))
    """
    start_worker(settings, program(code))
    celery = create_celery(settings)
    job_id = submit()
    with celery.connection_for_read() as connection:
        # Some messages arrive before or during the run, some after it.
        for _ in range(2):
            for _ in range(5):
                notify(celery, job_id, "cpu")
            eventually(lambda: look(job_id).status == "failed")
            eventually(
                lambda: connection.SimpleQueue(queue_name("cpu")).qsize() == 0 and not celery_state.reserved_requests
            )
    assert diary.read() == [job_id]
    assert look(job_id).attempt == 1
    celery.close()


@pytest.mark.parametrize("broker", sweep(["silent"], soak=["down"]))
def test_polling_alone_finishes_every_job(
    configure, start_worker, program, diary, submit, statuses, closed_port, silent_port, broker
):
    job_ids = [submit(max_attempts=1) for _ in range(8)]
    port = closed_port if broker == "down" else silent_port
    worker = start_worker(configure(broker_url=f"redis://127.0.0.1:{port}/0"), program(diary.note("sys.argv[1]")))
    eventually(lambda: statuses(job_ids) == {"failed": 8})
    assert sorted(diary.read()) == sorted(job_ids)
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < 40


def test_a_failed_consumer_is_replaced(configure, start_worker, program, diary, submit):
    started = []

    def note(sender, **_):
        started.append(sender)

    worker_init.connect(note)
    try:
        start_worker(configure(), program(""))
        eventually(lambda: len(started) == 1)
        # As Celery does itself after a hundred attempts to reach its broker.
        celery_state.should_stop = 1
        eventually(lambda: len(started) == 2)
    finally:
        celery_state.should_stop = None
        worker_init.disconnect(note)


def test_jobs_are_retried_after_their_backoff(configure, start_worker, program, diary, submit, look):
    job_id = submit(max_attempts=2)
    start_worker(configure(retry_backoff_seconds=1), program(diary.note("time.monotonic()")))
    eventually(lambda: look(job_id).status == "failed")
    first, second = map(float, diary.read())
    assert second - first >= 1


def test_a_stop_releases_the_running_job_and_leaves_no_thread(configure, start_worker, program, diary, submit, look):
    job_id = submit()
    before = set(threading.enumerate())
    worker = start_worker(configure(poll_seconds=60), program(diary.note("os.getpid()") + "\n" + FOREVER))
    eventually(diary.read)
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < 15
    assert set(threading.enumerate()) <= before
    assert (look(job_id).status, look(job_id).attempt) == ("queued", 0)


def test_a_worker_can_be_stopped_as_soon_as_it_has_started(configure, start_worker, program):
    for _ in range(3):
        start_worker(configure(), program(FOREVER)).stop()


def test_a_worker_survives_an_unexpected_error(settings, start_worker, program, submit, claim, database, look, caplog):
    job_id, lost = submit(max_attempts=1), submit(max_attempts=1)
    claim(lost, lease_seconds=0)
    with database.transaction() as session:
        session.execute(text("CREATE TRIGGER bug BEFORE UPDATE ON jobs BEGIN SELECT RAISE(ABORT, 'not foreseen'); END"))
    start_worker(settings, program("pass"))
    eventually(lambda: "unexpected error while looking for jobs" in caplog.text)
    eventually(lambda: "unexpected error while sweeping" in caplog.text)
    eventually(lambda: "unexpected error while notifying workers" in caplog.text)
    with database.transaction() as session:
        session.execute(text("DROP TRIGGER bug"))
    eventually(lambda: look(job_id).status == "failed")


def test_a_worker_survives_a_database_outage(configure, start_worker, program, submit, database, outage, look, caplog):
    job_id = submit(max_attempts=1)
    outage.begin(database)
    start_worker(configure(), program("pass"))
    eventually(lambda: "looking for jobs: the database" in caplog.text)
    eventually(lambda: "sweeping: the database" in caplog.text)
    outage.end()
    eventually(lambda: look(job_id).status == "failed")


def test_the_owner_of_the_folder_reclaims_all_held_jobs(settings, program, submit, claim, look):
    job_ids = [submit() for _ in range(120)]
    for job_id in job_ids:
        claim(job_id)
    worker = Worker(settings, program(""))
    worker.reclaim_all()
    assert {(look(job_id).status, look(job_id).attempt) for job_id in job_ids} == {("queued", 1)}
    worker._database.close()


def test_two_workers_run_each_job_exactly_once(configure, start_worker, program, diary, submit, statuses):
    job_ids = [submit(max_attempts=1) for _ in range(50)]
    shared = program(diary.note("sys.argv[1]"))
    # One in this process and one in a separate process.
    settings = configure()
    code = f"""
    from app.shared.settings import load_settings
    from worker.main import Worker
    worker = Worker(load_settings(), {shared!r})
    worker.start()
    {diary.note("'other'")}
    sys.stdin.read()
    worker.stop()
    """
    environment = {**os.environ, **settings.environment()}
    other = subprocess.Popen([sys.executable, *program(code)], env=environment, stdin=subprocess.PIPE)
    eventually(diary.read)
    start_worker(settings, shared)
    eventually(lambda: statuses(job_ids) == {"failed": 50})
    other.communicate()
    assert other.returncode == 0
    assert Counter(diary.read()) == Counter(["other", *job_ids])


@pytest.fixture
def redis():
    server = Redis()
    yield server
    server.close()


def test_with_redis_only_workers_of_the_queue_are_notified(
    configure, start_worker, program, diary, submit, statuses, redis
):
    # The only poll within a minute, and the only sweep, are at the start.
    settings = configure(poll_seconds=60, broker_url=redis.url)
    worker = start_worker(settings, program(diary.note("sys.argv[1]")), Equipment(queues=("cpu",), device="cpu"))
    time.sleep(1)
    for_gpu, for_cpu = submit(queue="gpu", max_attempts=1), submit(max_attempts=1)
    began = time.monotonic()
    worker.wake_relay()
    eventually(lambda: statuses([for_cpu]) == {"failed": 1})
    assert time.monotonic() - began < 10
    assert diary.read() == [for_cpu]
    assert statuses([for_gpu]) == {"queued": 1}


@pytest.mark.parametrize("fate", sweep(["running", "frozen"], soak=["idle"]))
def test_with_redis_a_worker_ends_promptly_and_releases_its_job(
    configure, start_worker, program, diary, submit, look, redis, fate
):
    settings = configure(broker_url=redis.url)
    worker = start_worker(settings, program(diary.note("os.getpid()") + "\n" + FOREVER))
    job_id = None
    if fate == "running":
        job_id = submit()
        eventually(diary.read)
    time.sleep(1)
    if fate == "frozen":
        redis.freeze()
    began = time.monotonic()
    worker.stop()
    seconds = time.monotonic() - began
    redis.thaw()
    # With a hanging broker, as long as its timeouts.
    assert seconds < (25 if fate == "frozen" else 4)
    if job_id is not None:
        assert (look(job_id).status, look(job_id).attempt) == ("queued", 0)
        assert len(diary.read()) == 1


def test_a_hanging_broker_does_not_delay_expired_leases(
    configure, start_worker, program, submit, claim, look, silent_port
):
    start_worker(configure(broker_url=f"redis://127.0.0.1:{silent_port}/0"), program("sys.exit(1)"))
    waiting = [submit(max_attempts=1) for _ in range(3)]
    eventually(lambda: all(look(job_id).status == "failed" for job_id in waiting))
    for _ in range(3):
        lost = submit(max_attempts=1)
        claim(lost, lease_seconds=0.5)
        eventually(lambda lost=lost: look(lost).status == "failed", within=4)
        assert look(lost).error["code"] == "worker_lost"
