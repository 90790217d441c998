import hashlib
import threading
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from app.shared.database import Database
from app.shared.errors import ConflictError, IdempotencyKeyReusedError, JobNotFoundError
from app.shared.lifecycle import Status
from app.shared.models import Base, IdempotencyKey, Identity, Job, OutboxRow
from app.shared.outcomes import JobError
from app.shared.repositories import jobs, leases, outputs, sweeps
from app.shared.repositories.jobs import Idempotency
from app.shared.requests import JobRequest

pytestmark = pytest.mark.databases("sqlite", "postgres")

KEY = Idempotency(key="abc", lifetime=timedelta(hours=1))
ERROR = JobError(code="x", message="broken")


def count(database, table):
    with database.snapshot() as session:
        return session.execute(select(func.count()).select_from(table)).scalar_one()


def end(database, job_id, status=Status.FAILED):
    with database.transaction() as session:
        if status == Status.CANCELLED:
            jobs.cancel_job(session, job_id)
        else:
            leases.fail_job(session, leases.claim_job(session, job_id, worker="w", lease_seconds=9), ERROR)


def test_a_new_job_is_queued_notified_and_owned(database, submit, request_body):
    job_id = submit()
    with database.snapshot() as session:
        job = jobs.get_job(session, job_id)
        assert (job.status, job.attempt, job.owner, job.progress) == ("queued", 0, "local", 0.0)
        assert JobRequest.model_validate(job.request) == request_body
        assert session.scalars(select(OutboxRow.job_id)).all() == [job_id]


def test_job_and_notification_are_written_together_or_not_at_all(database, request_body):
    def crash():
        with database.transaction() as session:
            jobs.create_job(session, request_body, max_attempts=3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert count(database, Job) == count(database, OutboxRow) == 0


def test_the_same_key_and_request_make_one_job(database, request_body):
    answers = []
    for _ in range(2):
        with database.transaction() as session:
            answers.append(jobs.create_job(session, request_body, max_attempts=3, idempotency=KEY))
    assert [answer.created for answer in answers] == [True, False]
    assert answers[0].job.id == answers[1].job.id
    assert count(database, Job) == count(database, OutboxRow) == 1


def test_the_same_key_with_another_request_is_refused(database, request_body):
    with database.transaction() as session:
        jobs.create_job(session, request_body, max_attempts=3, idempotency=KEY)
    other = JobRequest(model_id="local/tiny", ratio=0.4)
    with pytest.raises(IdempotencyKeyReusedError), database.transaction() as session:
        jobs.create_job(session, other, max_attempts=3, idempotency=KEY)
    assert count(database, Job) == 1


def test_idempotency_keys_are_separate_for_each_tenant(database, request_body):
    with database.transaction() as session:
        first = jobs.create_job(session, request_body, max_attempts=3, owner="a", idempotency=KEY)
        second = jobs.create_job(session, request_body, max_attempts=3, owner="b", idempotency=KEY)
    assert second.created
    assert first.job.id != second.job.id


def test_an_expired_idempotency_key_can_be_reused(database, request_body, clock):
    with database.transaction() as session:
        jobs.create_job(session, request_body, max_attempts=3, idempotency=KEY)
    clock.advance(3601)
    with database.transaction() as session:
        assert jobs.create_job(session, request_body, max_attempts=3, idempotency=KEY).created
    assert count(database, IdempotencyKey) == 1


def test_concurrent_submissions_with_one_key_make_one_job(database_url, request_body):
    database = Database(database_url)
    together, made = threading.Barrier(8), []

    def send():
        together.wait()
        with database.transaction() as session:
            made.append(jobs.create_job(session, request_body, max_attempts=3, idempotency=KEY).job.id)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1
    assert count(database, Job) == 1
    database.close()


def test_the_list_is_newest_first_and_pages_without_gaps(database, submit, clock):
    made = []
    for _ in range(5):
        clock.advance(0.002)
        made.append(submit())
    seen, after = [], None
    with database.snapshot() as session:
        while page := jobs.list_jobs(session, after=after, limit=2):
            seen += [job.id for job in page]
            after = seen[-1]
    assert seen == made[::-1]


def test_the_list_continues_after_a_deleted_job(database, submit, clock):
    first = submit()
    clock.advance(1)
    second = submit()
    end(database, second, Status.CANCELLED)
    with database.transaction() as session:
        jobs.delete_job(session, second)
        assert [job.id for job in jobs.list_jobs(session, after=second)] == [first]


def test_the_list_can_be_filtered_by_status(database, submit):
    submit()
    cancelled = submit()
    end(database, cancelled, Status.CANCELLED)
    with database.snapshot() as session:
        assert [job.id for job in jobs.list_jobs(session, jobs.JobFilter(status="cancelled"))] == [cancelled]


def test_jobs_of_other_tenants_are_neither_seen_nor_changed(database, submit):
    job_id = submit(owner="a")
    with database.transaction() as session:
        assert jobs.list_jobs(session, owner="b") == []
        assert jobs.count_active_jobs(session, "b") == 0
        assert jobs.count_active_jobs(session, "a") == 1
    for action in (
        jobs.get_job,
        jobs.cancel_job,
        jobs.delete_job,
        lambda session, job, owner: jobs.retry_job(session, job, max_attempts=3, owner=owner),
    ):
        with pytest.raises(JobNotFoundError), database.transaction() as session:
            action(session, job_id, "b")
    with database.snapshot() as session:
        assert jobs.get_job(session, job_id, "a").status == "queued"


def test_cancelling_a_queued_job_is_immediate_and_idempotent(database, submit):
    job_id = submit()
    with database.transaction() as session:
        assert jobs.cancel_job(session, job_id).status == "cancelled"
        events = jobs.get_job(session, job_id).last_event
        assert jobs.cancel_job(session, job_id).status == "cancelled"
        assert jobs.get_job(session, job_id).last_event == events
        assert leases.claim_job(session, job_id, worker="w", lease_seconds=9) is None


def test_cancelling_a_running_job_requests_a_stop(database, submit):
    job_id = submit()
    with database.transaction() as session:
        lease = leases.claim_job(session, job_id, worker="w", lease_seconds=9)
        assert jobs.cancel_job(session, job_id).status == "cancelling"
        assert jobs.cancel_job(session, job_id).status == "cancelling"
        assert leases.heartbeat(session, lease, lease_seconds=9) is Status.CANCELLING
        assert leases.release_job(session, lease) is Status.CANCELLED


def test_a_failed_job_cannot_be_cancelled(database, submit):
    job_id = submit()
    end(database, job_id)
    with pytest.raises(ConflictError), database.transaction() as session:
        jobs.cancel_job(session, job_id)


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED])
def test_a_retry_is_a_new_job_that_takes_over_the_checkpoints(database, submit, status):
    job_id = submit()
    with database.snapshot() as session:
        work_key = jobs.get_job(session, job_id).work_key
    end(database, job_id, status)
    with database.transaction() as session:
        retry = jobs.retry_job(session, job_id, max_attempts=3)
        assert retry.created
        assert (retry.job.status, retry.job.retry_of, retry.job.work_key) == ("queued", job_id, work_key)
        old = jobs.get_job(session, job_id)
        assert (old.status, old.work_key) == (status, None)
        assert retry.job.request == old.request


def publish(database, job_id, profile, chosen):
    """Publish layers and an allocation in an attempt, and fail it."""
    with database.transaction() as session:
        lease = leases.claim_job(session, job_id, worker="w", lease_seconds=9)
        for position, (name, _) in enumerate(chosen):
            outputs.save_layer_profile(session, lease, position, profile(name))
        outputs.save_allocation(session, lease, chosen)
        leases.fail_job(session, lease, ERROR)


def test_a_retry_has_layers_and_allocation_of_its_checkpoints(database, submit, profile, dense, factored):
    job_id, bystander = submit(), submit()
    chosen = [("b", factored), ("a", dense)]
    publish(database, job_id, profile, chosen)
    publish(database, bystander, profile, [("c", dense)])
    with database.transaction() as session:
        retry = jobs.retry_job(session, job_id, max_attempts=3).job
        jobs.retry_job(session, job_id, max_attempts=3)
    with database.transaction() as session:
        for owner in (job_id, retry.id):
            assert [layer.name for layer in outputs.list_layer_profiles(session, owner)] == ["b", "a"]
            assert outputs.list_allocation(session, owner) == chosen
        # A worker that finds them does not publish them again.
        lease = leases.claim_job(session, retry.id, worker="w", lease_seconds=9)
        assert not outputs.save_layer_profile(session, lease, 0, profile("b"))
        assert not outputs.save_allocation(session, lease, chosen)


def test_a_retry_without_checkpoints_has_no_layers(database, submit, profile, dense, clock):
    job_id = submit()
    publish(database, job_id, profile, [("a", dense)])
    clock.advance(timedelta(days=8).total_seconds())
    with database.transaction() as session:
        sweeps.forget_checkpoints(session, retention=timedelta(days=7))
        retry = jobs.retry_job(session, job_id, max_attempts=3).job
        assert outputs.list_layer_profiles(session, retry.id) == []
        assert outputs.list_allocation(session, retry.id) == []


def test_retrying_twice_makes_one_job(database, submit):
    job_id = submit()
    end(database, job_id)
    made = []
    for _ in range(2):
        with database.transaction() as session:
            made.append(jobs.retry_job(session, job_id, max_attempts=3))
    assert [retry.created for retry in made] == [True, False]
    assert made[0].job.id == made[1].job.id


def test_a_retry_without_checkpoints_starts_over(database, submit):
    job_id = submit()
    end(database, job_id)
    with database.transaction() as session:
        first = jobs.retry_job(session, job_id, max_attempts=3).job
        jobs.cancel_job(session, first.id)
        jobs.delete_job(session, first.id)
        second = jobs.retry_job(session, job_id, max_attempts=3)
        assert second.created
        assert second.job.work_key is not None


def test_a_queued_job_cannot_be_retried(database, submit):
    job_id = submit()
    with pytest.raises(ConflictError), database.transaction() as session:
        jobs.retry_job(session, job_id, max_attempts=3)


def test_an_active_job_cannot_be_deleted(database, submit):
    job_id = submit()
    with pytest.raises(ConflictError), database.transaction() as session:
        jobs.delete_job(session, job_id)


def test_deleting_a_job_leaves_no_row_in_any_table(database, submit, request_body):
    job_id = submit(idempotency=KEY)
    end(database, job_id, Status.CANCELLED)
    with database.transaction() as session:
        removed = jobs.delete_job(session, job_id)
    assert removed.work_key is not None
    for table in set(Base.metadata.sorted_tables) - {Identity.__table__}:
        assert count(database, table) == 0, table.name


@pytest.mark.parametrize(("asked", "default", "resolved"), [(None, "gpu", "gpu"), ("cpu", "gpu", "cpu")])
def test_a_job_uses_the_requested_or_default_queue_also_on_retry(database, submit, asked, default, resolved):
    job_id = submit(JobRequest(model_id="local/tiny", ratio=0.3, queue=asked), default_queue=default)
    end(database, job_id, Status.CANCELLED)
    with database.transaction() as session:
        retry = jobs.retry_job(session, job_id, max_attempts=3).job
        assert (jobs.get_job(session, job_id).queue, retry.queue) == (resolved, resolved)


def test_fingerprints_ignore_fields_added_later_if_unset():
    before = '{"model_id":"local/tiny","revision":null,"ratio":0.3,'
    request = JobRequest(model_id="local/tiny", ratio=0.3)
    assert request.model_dump_json().startswith(before)
    dumped = request.model_dump_json()
    names = ("queue", "evaluate", "target_bytes", "bits", "code_bits", "group_size", "include", "heal_tokens", "column")
    names += ("source_job_id", "on_source", "export_to", "push", "accept", "max_kl", "max_perplexity_increase", "fit")
    unset = dict.fromkeys(names, "null")
    defaults = {"benchmark": "false", "storage": '"file"', "engine": '"rocket"', "value_bits": "16"}
    defaults |= {"calibrate_all_experts": "false", "refine": "false", "token_weights": '"gradient"'}
    defaults |= {"skip_bad_rows": "false", "pack": "true"}
    for name, value in {**unset, **defaults}.items():
        assert dumped.count(f',"{name}":{value}') == 1
        dumped = dumped.replace(f',"{name}":{value}', "")
    assert request.fingerprint() == hashlib.sha256(dumped.encode()).hexdigest()
    assert JobRequest(model_id="local/tiny", ratio=0.3, queue="gpu").fingerprint() != request.fingerprint()


def test_a_replay_of_an_earlier_versions_request_makes_no_job(database, submit):
    body = {"model_id": "local/tiny", "ratio": 0.3}
    both = body | {"options": {"export": ["rocket", "dense"]}}
    # The key and the fingerprint that 0.1.0 stored for a body without exports.
    earlier = submit(JobRequest.model_validate(both), idempotency=KEY)
    assert submit(JobRequest.model_validate(body), idempotency=KEY) == earlier
    for other in ({"options": {"export": ["rocket"]}}, {"ratio": 0.4}):
        with pytest.raises(IdempotencyKeyReusedError):
            submit(JobRequest.model_validate(body | other), idempotency=KEY)


def test_an_engine_keeps_its_export_in_earlier_fingerprints():
    request = JobRequest(model_id="local/tiny", bits=4, options={"engine": "llama.cpp"})
    assert request.earlier_fingerprint() == request.fingerprint()
