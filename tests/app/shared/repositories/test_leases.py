import threading
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import text

from app.shared.database import Database
from app.shared.errors import FencedOutError
from app.shared.lifecycle import Status
from app.shared.outcomes import JobError, NewEvent
from app.shared.repositories import jobs, leases, outputs, sweeps
from app.shared.repositories.events import list_events
from app.shared.repositories.leases import Lease
from app.shared.requests import JobRequest
from tests.job_events import add_event

pytestmark = pytest.mark.databases("sqlite", "postgres")

WEEK = timedelta(days=7)
LEASE = {"worker": "w", "lease_seconds": 60.0}
BROKEN = JobError(code="broken", message="it broke")
FLAKY = JobError(code="flaky", message="try again", retryable=True)


@pytest.fixture
def claim(database):
    def claim(job_id, worker="w"):
        with database.transaction() as session:
            return leases.claim_job(session, job_id, worker=worker, lease_seconds=60.0)

    return claim


def look(database, job_id):
    with database.snapshot() as session:
        return jobs.get_job(session, job_id)


def test_a_claim_starts_an_attempt(database, submit, claim):
    job_id = submit()
    lease = claim(job_id)
    job = look(database, job_id)
    assert (job.status, job.attempt, job.fence, job.claimed_by) == ("running", 1, lease.fence, "w")
    assert job.started_at is not None


def test_a_claimed_job_cannot_be_claimed_again(submit, claim):
    job_id = submit()
    assert claim(job_id) is not None
    assert claim(job_id) is None


def test_an_unknown_job_cannot_be_claimed(claim):
    assert claim("job_0") is None


def test_a_job_without_attempts_left_cannot_be_claimed(database, submit, claim):
    job_id = submit(max_attempts=1)
    with database.transaction() as session:
        session.execute(text("UPDATE jobs SET attempt = max_attempts"))
    assert claim(job_id) is None
    with database.transaction() as session:
        assert leases.claim_next(session, **LEASE) is None


def test_eight_workers_claim_fifty_jobs_once_each(database_url, submit, clock):
    job_ids = [submit() for _ in range(50)]
    database = Database(database_url, clock=clock)
    together, won = threading.Barrier(8), []

    def work(worker):
        together.wait()
        for job_id in job_ids:
            with database.transaction() as session:
                if leases.claim_job(session, job_id, worker=worker, lease_seconds=60.0) is not None:
                    won.append(job_id)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(won) == Counter(job_ids)
    assert all(look(database, job_id).attempt == 1 for job_id in job_ids)
    database.close()


def test_polling_workers_find_every_job_once_oldest_first(database, submit, clock):
    made = []
    for _ in range(3):
        made.append(submit())
        clock.advance(0.002)
    found = []
    with database.transaction() as session:
        while lease := leases.claim_next(session, **LEASE):
            found.append(lease.job_id)
    assert found == made


def test_a_heartbeat_extends_the_lease(database, submit, claim, clock):
    job_id = submit()
    lease = claim(job_id)
    before = look(database, job_id).lease_until
    clock.advance(40)
    with database.transaction() as session:
        assert leases.heartbeat(session, lease, lease_seconds=60) is Status.RUNNING
    assert (look(database, job_id).lease_until - before).total_seconds() == 40


def test_a_release_does_not_count_as_an_attempt(database, submit, claim):
    job_id = submit(max_attempts=1)
    for _ in range(3):
        lease = claim(job_id)
        with database.transaction() as session:
            assert leases.release_job(session, lease) is Status.QUEUED
    job = look(database, job_id)
    assert (job.status, job.attempt, job.fence, job.lease_until) == ("queued", 0, None, None)


def test_a_released_job_is_notified_again(database, submit, claim):
    job_id = submit()
    with database.transaction() as session:
        sweeps.delete_notifications(session, sweeps.list_notifications(session))
    lease = claim(job_id)
    with database.transaction() as session:
        leases.release_job(session, lease)
        assert [row.job_id for row in sweeps.list_notifications(session)] == [job_id]


def test_a_permanent_error_fails_the_job_and_is_stored(database, submit, claim):
    job_id = submit()
    lease = claim(job_id)
    with database.transaction() as session:
        assert leases.fail_job(session, lease, BROKEN) is Status.FAILED
    job = look(database, job_id)
    assert JobError.model_validate(job.error) == BROKEN
    assert job.finished_at is not None


def test_a_retryable_error_backs_off_until_attempts_run_out(database, submit, claim, clock):
    job_id = submit(max_attempts=3)
    for wait in (10, 20):
        lease = claim(job_id)
        with database.transaction() as session:
            assert leases.fail_job(session, lease, FLAKY, backoff_seconds=10) is Status.QUEUED
        clock.advance(wait - 0.1)
        assert claim(job_id) is None
        clock.advance(0.2)
    lease = claim(job_id)
    with database.transaction() as session:
        assert leases.fail_job(session, lease, FLAKY, backoff_seconds=10) is Status.FAILED
    assert look(database, job_id).attempt == 3
    assert claim(job_id) is None


def test_a_job_being_cancelled_ends_cancelled_even_if_it_fails(database, submit, claim):
    job_id = submit()
    lease = claim(job_id)
    with database.transaction() as session:
        jobs.cancel_job(session, job_id)
        assert leases.fail_job(session, lease, BROKEN) is Status.CANCELLED
    assert look(database, job_id).error is None


def writes(profile, factored, report, result, artifact, lease):
    """Return every write that a worker can make."""
    return {
        "heartbeat": lambda s: leases.heartbeat(s, lease, lease_seconds=9),
        "release": lambda s: leases.release_job(s, lease),
        "fail": lambda s: leases.fail_job(s, lease, BROKEN),
        "progress": lambda s: outputs.report_progress(s, lease, stage="calibrating", progress=0.5),
        "event": lambda s: add_event(s, lease, NewEvent(type="message", message="hello")),
        "profile": lambda s: outputs.save_layer_profile(s, lease, 0, profile("l0")),
        "allocation": lambda s: outputs.save_allocation(s, lease, [("l0", factored)]),
        "discard": lambda s: outputs.discard_layers(s, lease, NewEvent(type="message", message="hello")),
        "succeed": lambda s: outputs.succeed_job(
            s, lease, result=result, report=report, artifacts=[artifact], retention=WEEK
        ),
    }


@pytest.mark.parametrize("thief", ["nobody", "another worker", "the end"])
def test_a_worker_that_lost_its_job_cannot_write(
    database, submit, claim, clock, thief, profile, factored, report, result, artifact
):
    job_id = submit()
    lease = claim(job_id)
    clock.advance(61)
    with database.transaction() as session:
        assert sweeps.reclaim_expired(session) == [job_id]
    if thief != "nobody":
        second = claim(job_id, "thief")
        if thief == "the end":
            with database.transaction() as session:
                leases.fail_job(session, second, BROKEN)
    before = look(database, job_id)
    for name, write in writes(profile, factored, report, result, artifact, lease).items():
        with pytest.raises(FencedOutError), database.transaction() as session:
            write(session)
        after = look(database, job_id)
        assert (after.status, after.fence, after.last_event) == (before.status, before.fence, before.last_event), name
        assert (after.stage, after.progress) == (before.stage, before.progress), name
    with database.snapshot() as session:
        assert outputs.list_layer_profiles(session, job_id) == []
        assert outputs.list_allocation(session, job_id) == []
        assert outputs.list_artifacts(session, before) == []


def test_a_wrong_or_missing_fence_holds_no_job(database, submit):
    job_id = submit()
    for fence in ("", None, "0" * 32):
        with pytest.raises(FencedOutError), database.transaction() as session:
            leases.release_job(session, Lease(job_id=job_id, fence=fence))


def test_a_late_heartbeat_keeps_a_job_that_was_not_reclaimed(database, submit, claim, clock):
    job_id = submit()
    lease = claim(job_id)
    clock.advance(100)
    with database.transaction() as session:
        leases.heartbeat(session, lease, lease_seconds=60)
        assert sweeps.reclaim_expired(session) == []


def test_a_worker_claims_jobs_of_its_queues_only(database, submit):
    for_cpu, for_gpu = submit(), submit(JobRequest(model_id="local/tiny", ratio=0.3, queue="gpu"))
    with database.transaction() as session:
        assert leases.claim_job(session, for_gpu, queues=("cpu",), **LEASE) is None
        assert leases.claim_next(session, queues=("cpu",), **LEASE).job_id == for_cpu
        assert leases.claim_next(session, queues=("cpu",), **LEASE) is None
        assert leases.claim_next(session, queues=("cpu", "gpu"), **LEASE).job_id == for_gpu


def test_a_claim_and_each_report_count_as_progress(database, submit, claim, clock):
    lease = claim(submit())
    seen = [look(database, lease.job_id).progressed_at]
    for _ in range(2):
        clock.advance(5)
        with database.transaction() as session:
            # What an earlier attempt had already reached.
            outputs.report_progress(session, lease, stage="calibrating", progress=0.1)
        seen.append(look(database, lease.job_id).progressed_at)
    clock.advance(5)
    with database.transaction() as session:
        leases.heartbeat(session, lease, lease_seconds=60)
    assert [(at - seen[0]).total_seconds() for at in seen] == [0, 5, 10]
    assert look(database, lease.job_id).progressed_at == seen[-1]


def test_a_worker_finds_the_oldest_job_of_another(database, submit, claim, clock):
    submitted = []
    for queue in ("cpu", "cpu", "cpu", "gpu"):
        submitted.append(submit(JobRequest(model_id="local/tiny", ratio=0.3, queue=queue)))
        # Ids are in the order of time, to the millisecond.
        clock.advance(1)
    first, second, third, other_queue = submitted

    def found(worker="idle", without=()):
        with database.snapshot() as session:
            running = leases.find_running(session, worker=worker, queues=("cpu",), without=without)
        return None if running is None else (running[0].id, running[1])

    assert found() is None
    mine, theirs = claim(first, "a"), claim(second, "b")
    claim(other_queue, "b")

    assert found() == (first, Lease(job_id=first, fence=mine.fence))
    assert found("a") == (second, Lease(job_id=second, fence=theirs.fence))
    assert found(without=[mine.fence, theirs.fence]) is None
    with database.transaction() as session:
        jobs.cancel_job(session, first)
    assert found() == (second, Lease(job_id=second, fence=theirs.fence))
    clock.advance(61)
    assert found() is None
    assert look(database, third).status == "queued"


def test_a_job_is_available_to_workers_of_its_queue(database, submit, claim):
    def is_any_available(queue):
        with database.snapshot() as session:
            return leases.is_any_available(session, [queue])

    job_id = submit()
    assert is_any_available("cpu")
    assert not is_any_available("gpu")
    claim(job_id)
    assert not is_any_available("cpu")


def test_a_note_is_an_event_of_a_leased_job(database, submit, claim):
    job_id = submit()
    lease = claim(job_id)
    event = NewEvent(type="message", message="hello")
    with database.transaction() as session:
        leases.note(session, lease, event)
    with database.snapshot() as session:
        assert list_events(session, job_id)[-1].message == "hello"
    with database.transaction() as session, pytest.raises(FencedOutError):
        leases.note(session, Lease(job_id=job_id, fence="f" * 32), event)
