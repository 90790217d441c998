from datetime import timedelta

import pytest

from app.shared.models import Job, Upload
from app.shared.outcomes import JobError, NewEvent
from app.shared.repositories import jobs, leases, outputs, sweeps
from app.shared.repositories.statistics import read_attempt, read_statistics
from tests.job_events import add_event

BROKEN = JobError(code="x", message="m", retryable=True)


@pytest.fixture
def do(database):
    def do(function, *arguments, **options):
        with database.transaction() as session:
            return function(session, *arguments, **options)

    return do


@pytest.fixture
def claim(do, submit):
    def claim(job_id=None):
        return do(leases.claim_job, job_id or submit(), worker="w", lease_seconds=60)

    return claim


@pytest.fixture
def attempt(do):
    return lambda lease: do(read_attempt, lease.job_id, after=lease.claim_event)


@pytest.fixture
def statistics(do):
    return lambda: do(read_statistics, lease_seconds=60)


def test_an_empty_service_has_empty_statistics(statistics):
    told = statistics()
    assert (told.active_jobs, told.waiting_seconds, told.silent_seconds) == ({}, {}, {})
    assert (told.unsent_notifications, told.artifact_bytes, told.upload_bytes) == (0, 0, 0)


def test_active_jobs_are_counted_by_queue_and_status(database, do, statistics, submit, claim):
    submit()
    elsewhere = submit()
    with database.transaction() as session:
        session.get(Job, elsewhere).queue = "gpu"
    claim()
    do(jobs.cancel_job, claim().job_id)
    do(leases.fail_job, claim(), JobError(code="x", message="m"))
    assert statistics().active_jobs == {
        ("cpu", "queued"): 1,
        ("gpu", "queued"): 1,
        ("cpu", "running"): 1,
        ("cpu", "cancelling"): 1,
    }


def test_a_job_waits_from_the_time_it_becomes_claimable(do, statistics, submit, claim, clock):
    do(leases.fail_job, claim(), BROKEN, backoff_seconds=50)
    # Cannot be claimed yet.
    assert statistics().waiting_seconds == {}
    clock.advance(60)
    assert statistics().waiting_seconds == {"cpu": 10}
    submit()
    clock.advance(100)
    assert statistics().waiting_seconds == {"cpu": 110}


def test_silence_is_measured_from_the_oldest_renewal(do, statistics, claim, clock):
    claim()
    clock.advance(25)
    renewed = claim()
    assert statistics().silent_seconds == {"cpu": 25}
    clock.advance(10)
    do(leases.heartbeat, renewed, lease_seconds=60)
    assert statistics().silent_seconds == {"cpu": 35}
    clock.advance(100)
    assert statistics().silent_seconds == {"cpu": 135}


def test_notifications_and_bytes_are_those_that_exist(
    database, do, statistics, submit, claim, artifact, report, result, clock
):
    job_id = submit()
    assert statistics().unsent_notifications == 1
    do(sweeps.delete_notifications, do(sweeps.list_notifications))
    assert statistics().unsent_notifications == 0
    retention = timedelta(seconds=10)
    do(outputs.succeed_job, claim(job_id), result=result, report=report, artifacts=[artifact], retention=retention)
    with database.transaction() as session:
        upload = {"id": "u", "storage_key": "k", "sha256": "0" * 64, "size": 40, "suffix": ".txt", "documents": 1}
        session.add(Upload(owner="local", created_at=session.get(Job, job_id).created_at, **upload))
    assert (statistics().artifact_bytes, statistics().upload_bytes) == (artifact.size, 40)
    clock.advance(11)
    do(sweeps.expire_artifacts)
    assert statistics().artifact_bytes == 0


def test_an_attempt_that_succeeds_has_all_its_stages_and_bytes(
    do, attempt, claim, artifact, report, result, profile, clock
):
    lease = claim()
    assert attempt(lease) is None
    for stage, duration in (("preflight", 2), ("calibrating", 30), ("exporting", 5)):
        do(outputs.report_progress, lease, stage=stage, progress=0.1)
        clock.advance(duration)
        do(outputs.save_layer_profile, lease, 0, profile("a"))
    succeed = {"result": result, "report": report, "artifacts": [artifact], "retention": timedelta(1)}
    do(outputs.succeed_job, lease, **succeed)
    told = attempt(lease)
    assert (told.outcome, told.published_bytes) == ("succeeded", artifact.size)
    assert [(stage, time.total_seconds()) for stage, time in told.stages] == [
        ("preflight", 2),
        ("calibrating", 30),
        ("exporting", 5),
    ]


def test_an_interrupted_stage_has_no_duration(do, attempt, claim, clock):
    lease = claim()
    for stage in ("preflight", "calibrating"):
        do(outputs.report_progress, lease, stage=stage, progress=0.1)
        clock.advance(3)
    do(leases.fail_job, lease, JobError(code="x", message="m"))
    told = attempt(lease)
    assert (told.outcome, told.published_bytes) == ("failed", 0)
    assert told.stages == (("preflight", timedelta(seconds=3)),)


def test_each_outcome_of_an_attempt_has_its_name(do, attempt, claim, clock):
    retried, released, cancelled, lost = claim(), claim(), claim(), claim()
    do(leases.fail_job, retried, BROKEN)
    do(leases.release_job, released)
    do(jobs.cancel_job, cancelled.job_id)
    assert attempt(cancelled) is None
    do(leases.release_job, cancelled)
    clock.advance(61)
    assert do(sweeps.reclaim_expired) == [lost.job_id]
    assert [attempt(lease).outcome for lease in (retried, released, cancelled, lost)] == [
        "queued",
        "released",
        "cancelled",
        "lost",
    ]


def test_statistics_of_an_attempt_exclude_the_next_one(do, attempt, claim):
    first = claim()
    do(add_event, first, NewEvent(type="message", message="hello"))
    do(leases.release_job, first)
    second = claim(first.job_id)
    do(leases.fail_job, second, JobError(code="x", message="m"))
    assert (attempt(first).outcome, attempt(second).outcome) == ("released", "failed")


def test_a_deleted_job_has_no_attempt_statistics(do, attempt, claim):
    lease = claim()
    do(leases.fail_job, lease, JobError(code="x", message="m"))
    do(jobs.delete_job, lease.job_id)
    assert attempt(lease) is None
