import subprocess
import sys
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from app.shared.errors import InvalidSettingsError
from app.shared.metrics import WorkerMetrics, create_registry
from tests.worker.waiting import eventually
from worker.main import Worker
from worker.reconciler import Reconciler
from worker.runner import Runner

# What a job's process does to its row, without the work.
BEGIN = """
    from app.shared.database import Database
    from app.shared.outcomes import JobError
    from app.shared.repositories import leases, outputs
    from app.shared.settings import load_settings
    database = Database(load_settings().database)
    lease = leases.Lease(job_id=sys.argv[1], fence=sys.argv[2])
    def do(function, *arguments, **options):
        with database.transaction() as session:
            return function(session, *arguments, **options)
    for stage in ("preflight", "calibrating", "exporting"):
        do(outputs.report_progress, lease, stage=stage, progress=0.5)
        time.sleep(0.05)
"""
SUCCEED = """
    from datetime import datetime, timedelta, UTC
    from sqlalchemy import insert
    from app.shared.models import Artifact
    from app.shared.lifecycle import Status
    with database.transaction() as session:
        job = leases.lock_leased_job(session, lease)
        at = datetime.now(UTC)
        for number in range(2):
            session.execute(insert(Artifact).values(
                job_id=job.id, name=str(number), storage_key=f"{number}" + job.work_key[1:], size=1000 + number,
                sha256="0" * 64, media_type="x", created_at=at, expires_at=at + timedelta(1)))
        leases.end_job(session, job, Status.SUCCEEDED, at)
"""
FAIL = 'do(leases.fail_job, lease, JobError(code="x", message="m", retryable={retryable}))'


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def count(registry):
    def count(name, **labels):
        return registry.get_sample_value(f"rocket_{name}", labels)

    return count


@pytest.fixture
def ended(registry):
    """Attempts that have ended, by outcome."""

    def ended():
        [family] = [family for family in registry.collect() if family.name == "rocket_attempts_ended"]
        totals = {sample.labels["outcome"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
        return {outcome: number for outcome, number in totals.items() if number}

    return ended


@pytest.fixture
def attempt(settings, database, program, registry):
    """Return a function that runs a program once instead of a job's process."""
    metrics = WorkerMetrics(registry)

    def attempt(*code):
        text = "\n".join([BEGIN, *code])
        assert Runner(settings, database, program(text), metrics=metrics).run()

    return attempt


def test_every_attempt_is_counted_by_how_it_ended(attempt, submit, count, ended, cancel):
    submit()
    attempt(SUCCEED)
    submit(max_attempts=1)
    attempt("    " + FAIL.format(retryable=False))
    # First without an outcome, then with a retryable error, and killed in the last attempt.
    submit(max_attempts=3)
    attempt("    sys.exit(3)")
    attempt("    " + FAIL.format(retryable=True))
    attempt("    os.kill(os.getpid(), signal.SIGKILL)")
    job_id = submit()
    attempt("    do(leases.release_job, lease)")
    cancel(job_id)
    assert ended() == {"succeeded": 1, "failed": 2, "queued": 2, "released": 1}
    assert count("attempts_started_total") == 6
    assert count("jobs_running") == 0


def test_stages_and_bytes_are_those_of_the_attempts(attempt, submit, count):
    submit()
    attempt(SUCCEED)
    submit()
    attempt("    " + FAIL.format(retryable=False))
    for stage, finished in (("preflight", 2), ("calibrating", 2), ("exporting", 1)):
        assert count("stage_seconds_count", stage=stage) == finished
        assert 0.05 * finished <= count("stage_seconds_sum", stage=stage) < 5 * finished
    assert count("published_bytes_total") == 1000 + 1001


def test_a_running_job_is_a_job_running(settings, database, program, registry, submit, diary, count, cancel):
    submit()
    runner = Runner(
        settings, database, program(diary.note(1) + "\nwhile True: time.sleep(1)"), metrics=WorkerMetrics(registry)
    )
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    eventually(diary.read)
    assert (count("jobs_running"), count("attempts_started_total")) == (1, 1)
    runner.abort()
    thread.join()
    assert count("jobs_running") == 0


def test_a_lease_that_was_lost_is_counted_by_who_took_it_and_by_who_lost_it(
    settings, database, program, registry, submit, diary, count, ended
):
    submit()
    metrics = WorkerMetrics(registry)
    runner = Runner(settings, database, program(diary.note(1) + "\nwhile True: time.sleep(1)"), metrics=metrics)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    eventually(diary.read)
    reconciler = Reconciler(settings, database, metrics=metrics)
    reconciler.reclaim()
    assert count("leases_lost_total", noticed_by="reconciler") == 0
    with database.transaction() as session:
        session.connection().exec_driver_sql("UPDATE jobs SET lease_until = '2000-01-01 00:00:00.000000'")
    reconciler.reclaim()
    runner.abort()
    thread.join()
    assert count("leases_lost_total", noticed_by="reconciler") == 1
    assert count("leases_lost_total", noticed_by="worker") == 1
    assert ended() == {"lost": 1}


def test_a_sweep_says_when_it_was_and_one_without_a_database_does_not(settings, database, registry, count, away):
    reconciler = Reconciler(settings, database, metrics=WorkerMetrics(registry))
    assert count("last_sweep_timestamp_seconds") == 0
    away.take(database)
    with pytest.raises(Exception, match="database"):
        reconciler.sweep()
    assert count("last_sweep_timestamp_seconds") == 0
    away.bring_back()
    reconciler.sweep()
    assert count("last_sweep_timestamp_seconds") > 1.6e9


def test_an_attempt_whose_end_cannot_be_read_is_counted_too(
    settings, database, program, registry, submit, away, diary, ended
):
    submit()
    runner = Runner(settings, database, program(diary.note(1) + "\ntime.sleep(0.5)"), metrics=WorkerMetrics(registry))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    eventually(diary.read)
    away.take(database)
    thread.join()
    away.bring_back()
    assert ended() == {"unknown": 1}


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


@pytest.fixture
def employ(program):
    workers = []

    def employ(settings, **options):
        workers.append(Worker(settings, program(""), **options))
        workers[-1].start()
        return workers[-1]

    yield employ
    for worker in workers:
        worker.stop()


def test_a_worker_of_its_own_serves_its_metrics_on_the_loopback_and_its_health_can_be_asked(
    configure, employ, monkeypatch
):
    worker = employ(configure(metrics_port=0))
    address, port = worker._metrics_server._server.server_address
    assert address == "127.0.0.1"
    eventually(lambda: scrape(port)["rocket_last_sweep_timestamp_seconds"] > 0)
    assert scrape(port)["process_open_fds"] > 0
    monkeypatch.setenv("ROCKET_METRICS_PORT", str(port))
    result = subprocess.run(
        [sys.executable, "-m", "worker.health"], check=False, capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 0, result
    worker.stop()
    result = subprocess.run(
        [sys.executable, "-m", "worker.health"], check=False, capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, "no answer" in result.stdout) == (1, True)


def test_a_worker_beside_an_api_has_no_port_of_its_own(configure, employ):
    registry = create_registry()
    worker = employ(configure(metrics_port=0), registry=registry)
    assert worker._metrics_server is None
    eventually(lambda: registry.get_sample_value("rocket_last_sweep_timestamp_seconds"))


def test_a_port_that_is_taken_is_said_by_its_setting_and_nothing_starts(configure, employ, program):
    first = employ(configure(metrics_port=0))
    second = Worker(configure(metrics_port=first._metrics_server.port), program(""))
    with pytest.raises(InvalidSettingsError, match="ROCKET_METRICS_PORT"):
        second.start()
    second._database.close()
