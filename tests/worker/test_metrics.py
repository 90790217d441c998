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
    """Return the attempts that have ended, by outcome."""

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


def test_every_attempt_is_counted_by_its_outcome(attempt, submit, count, ended, cancel):
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


def test_stages_and_bytes_are_summed_over_attempts(attempt, submit, count):
    submit()
    attempt(SUCCEED)
    submit()
    attempt("    " + FAIL.format(retryable=False))
    for stage, finished in (("preflight", 2), ("calibrating", 2), ("exporting", 1)):
        assert count("stage_seconds_count", stage=stage) == finished
        assert 0.05 * finished <= count("stage_seconds_sum", stage=stage) < 5 * finished
    assert count("published_bytes_total") == 1000 + 1001


def test_running_jobs_are_counted(settings, database, program, registry, submit, diary, count, cancel):
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


def test_a_lost_lease_is_counted_by_both_sides(settings, database, program, registry, submit, diary, count, ended):
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


def test_only_a_successful_sweep_updates_its_timestamp(settings, database, registry, count, outage):
    reconciler = Reconciler(settings, database, metrics=WorkerMetrics(registry))
    assert count("last_sweep_timestamp_seconds") == 0
    outage.begin(database)
    with pytest.raises(Exception, match="database"):
        reconciler.sweep()
    assert count("last_sweep_timestamp_seconds") == 0
    outage.end()
    reconciler.sweep()
    assert count("last_sweep_timestamp_seconds") > 1.6e9


def test_an_attempt_with_an_unknown_outcome_is_counted(
    settings, database, program, registry, submit, outage, diary, ended
):
    submit()
    runner = Runner(settings, database, program(diary.note(1) + "\ntime.sleep(0.5)"), metrics=WorkerMetrics(registry))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    eventually(diary.read)
    outage.begin(database)
    thread.join()
    outage.end()
    assert ended() == {"unknown": 1}


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


@pytest.fixture
def start_worker(program):
    workers = []

    def start_worker(settings, **options):
        workers.append(Worker(settings, program(""), **options))
        workers[-1].start()
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.stop()


def test_a_worker_serves_metrics_on_the_loopback_and_health(configure, start_worker, monkeypatch):
    worker = start_worker(configure(metrics_port=0))
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


def test_a_worker_within_an_api_process_opens_no_port(configure, start_worker):
    registry = create_registry()
    worker = start_worker(configure(metrics_port=0), registry=registry)
    assert worker._metrics_server is None
    eventually(lambda: registry.get_sample_value("rocket_last_sweep_timestamp_seconds"))


def test_a_taken_port_is_reported_by_its_setting(configure, start_worker, program):
    first = start_worker(configure(metrics_port=0))
    second = Worker(configure(metrics_port=first._metrics_server.port), program(""))
    with pytest.raises(InvalidSettingsError, match="ROCKET_METRICS_PORT"):
        second.start()
    second._database.close()
