from datetime import timedelta

import pytest

from app.shared.outcomes import JobError
from app.shared.repositories import jobs, leases, outputs, sweeps
from app.shared.repositories.jobs import Idempotency

pytestmark = pytest.mark.databases("sqlite", "postgres")

WEEK = timedelta(days=7)


@pytest.fixture
def claim(database):
    def claim(job_id, worker="w"):
        with database.transaction() as session:
            return leases.claim_job(session, job_id, worker=worker, lease_seconds=60.0)

    return claim


@pytest.fixture
def sweep(database):
    def sweep(function, **options):
        with database.transaction() as session:
            return function(session, **options)

    return sweep


def look(database, job_id):
    with database.snapshot() as session:
        return jobs.get_job(session, job_id)


def test_a_notification_waits_until_it_is_sent(submit, sweep):
    job_id = submit()
    waiting = sweep(sweeps.list_notifications)
    assert [row.job_id for row in waiting] == [job_id]
    assert sweep(sweeps.list_notifications) == waiting
    sweep(sweeps.delete_notifications, sent=waiting)
    assert sweep(sweeps.list_notifications) == []


def test_a_job_that_nobody_heard_of_is_notified_again(submit, sweep, clock):
    job_id = submit()
    sweep(sweeps.delete_notifications, sent=sweep(sweeps.list_notifications))
    assert sweep(sweeps.renotify, notify_seconds=30) == 0
    clock.advance(31)
    assert sweep(sweeps.renotify, notify_seconds=30) == 1
    assert sweep(sweeps.renotify, notify_seconds=30) == 0
    assert [row.job_id for row in sweep(sweeps.list_notifications)] == [job_id]


def test_a_running_job_is_not_notified(submit, sweep, claim, clock):
    claim(submit())
    sweep(sweeps.delete_notifications, sent=sweep(sweeps.list_notifications))
    clock.advance(31)
    assert sweep(sweeps.renotify, notify_seconds=30) == 0


def test_a_job_of_a_silent_worker_returns_to_the_queue(database, submit, sweep, claim, clock):
    job_id = submit()
    claim(job_id)
    clock.advance(59)
    assert sweep(sweeps.reclaim_expired) == []
    clock.advance(1)
    assert sweep(sweeps.reclaim_expired) == [job_id]
    job = look(database, job_id)
    assert (job.status, job.attempt, job.fence) == ("queued", 1, None)
    assert claim(job_id) is not None


def test_a_job_that_kills_workers_fails_after_max_attempts(database, submit, sweep, claim, clock):
    job_id = submit(max_attempts=3)
    starts = 0
    while claim(job_id) is not None:
        starts += 1
        clock.advance(61)
        sweep(sweeps.reclaim_expired)
    job = look(database, job_id)
    assert starts == 3
    assert job.status == "failed"
    assert JobError.model_validate(job.error).code == "worker_lost"


def test_a_job_being_cancelled_by_a_dead_worker_is_cancelled(database, submit, sweep, claim, clock):
    job_id = submit()
    claim(job_id)
    sweep(jobs.cancel_job, job_id=job_id)
    clock.advance(61)
    sweep(sweeps.reclaim_expired)
    assert look(database, job_id).status == "cancelled"


def test_the_owner_of_the_data_folder_reclaims_every_job(submit, sweep, claim):
    job_ids = [submit(), submit()]
    for job_id in job_ids:
        claim(job_id)
    queued = submit()
    assert sorted(sweep(sweeps.reclaim_claimed)) == sorted(job_ids)
    assert queued not in sweep(sweeps.reclaim_claimed)


def test_artifacts_expire_once_and_stay_listed(database, submit, sweep, claim, clock, report, result, artifact):
    job_id = submit()
    lease = claim(job_id)
    sweep(outputs.succeed_job, lease=lease, result=result, report=report, artifacts=[artifact], retention=WEEK)
    assert sweep(sweeps.expire_artifacts) == []
    clock.advance(WEEK.total_seconds())
    assert sweep(sweeps.expire_artifacts) == [artifact.storage_key]
    assert sweep(sweeps.expire_artifacts) == []
    with database.snapshot() as session:
        found = outputs.find_artifact(session, jobs.get_job(session, job_id), artifact.name)
        assert found.storage_key is None


def test_checkpoints_of_jobs_that_ended_long_ago_are_released(database, submit, sweep, clock):
    ended, waiting = submit(), submit()
    sweep(jobs.cancel_job, job_id=ended)
    clock.advance(WEEK.total_seconds() - 1)
    sweep(sweeps.forget_checkpoints, retention=WEEK)
    assert look(database, ended).work_key is not None
    clock.advance(2)
    sweep(sweeps.forget_checkpoints, retention=WEEK)
    assert look(database, ended).work_key is None
    assert look(database, waiting).work_key is not None


def test_expired_idempotency_keys_are_deleted(database, submit, sweep, clock, request_body):
    key = Idempotency(key="k", lifetime=timedelta(hours=1))
    job_id = submit(idempotency=key)
    clock.advance(3601)
    sweep(sweeps.forget_idempotency_keys)
    assert submit(idempotency=key) != job_id


def test_orphans_are_keys_that_no_row_references(database, submit, sweep, claim, report, result, artifact):
    waiting, done = submit(), submit()
    sweep(outputs.succeed_job, lease=claim(done), result=result, report=report, artifacts=[artifact], retention=WEEK)
    known = look(database, waiting).work_key
    orphans = sweep(sweeps.find_orphans, storage_keys=[artifact.storage_key, "b" * 32], work_keys=[known, "c" * 32])
    assert orphans == {"b" * 32, "c" * 32}
