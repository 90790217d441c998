from datetime import timedelta

import pytest

from app.shared.errors import ArtifactNotFoundError
from app.shared.lifecycle import Status
from app.shared.outcomes import JobResult, NewEvent
from app.shared.repositories import events, jobs, leases, outputs, sweeps
from rocket_core.candidates import Candidate
from rocket_core.report.schema import CompressionReport
from tests.job_events import add_event

pytestmark = pytest.mark.databases("sqlite", "postgres")

WEEK = timedelta(days=7)


@pytest.fixture
def held(database, submit):
    job_id = submit()
    with database.transaction() as session:
        return leases.claim_job(session, job_id, worker="w", lease_seconds=60)


def messages(session, job_id, **options):
    return [event.message for event in events.list_events(session, job_id, **options)]


def test_a_new_stage_is_an_event_and_its_progress_is_not(database, held, clock):
    with database.transaction() as session:
        for stage, progress in (("preflight", 0.0), ("calibrating", 0.1), ("calibrating", 0.2)):
            outputs.report_progress(session, held, stage=stage, progress=progress)
        job = jobs.get_job(session, held.job_id)
        assert (job.stage, job.progress) == ("calibrating", 0.2)
        assert messages(session, held.job_id) == ["queued", "running", "preflight", "calibrating"]


@pytest.mark.parametrize(("told", "kept"), [(-0.1, 0.0), (1.00001, 1.0)])
def test_progress_stays_within_its_range(database, held, told, kept):
    with database.transaction() as session:
        outputs.report_progress(session, held, stage="exporting", progress=told)
        assert jobs.get_job(session, held.job_id).progress == kept


def test_progress_does_not_fall_while_a_later_attempt_catches_up(database, held):
    with database.transaction() as session:
        for stage, progress in (("calibrating", 0.5), ("preflight", 0.0), ("calibrating", 0.03)):
            outputs.report_progress(session, held, stage=stage, progress=progress)
        job = jobs.get_job(session, held.job_id)
        assert (job.stage, job.progress) == ("calibrating", 0.5)


def test_events_are_numbered_without_gaps_and_read_in_order(database, held):
    with database.transaction() as session:
        for number in range(5):
            add_event(session, held, NewEvent(type="message", message=f"m{number}", data={"n": number}))
        listed = events.list_events(session, held.job_id)
        assert [event.sequence for event in listed] == list(range(1, 8))
        assert messages(session, held.job_id, after=5) == ["m3", "m4"]
        assert messages(session, held.job_id, after=2, limit=2) == ["m0", "m1"]


def test_layers_are_listed_unchanged_in_model_order(database, held, profile):
    with database.transaction() as session:
        assert outputs.save_layer_profile(session, held, 1, profile("a"))
        assert outputs.save_layer_profile(session, held, 0, profile("b"))
    with database.snapshot() as session:
        assert outputs.list_layer_profiles(session, held.job_id) == [profile("b"), profile("a")]


def test_a_layer_computed_twice_is_published_once(database, held, profile, clock):
    with database.transaction() as session:
        assert outputs.save_layer_profile(session, held, 0, profile("a"))
    clock.advance(61)
    with database.transaction() as session:
        sweeps.reclaim_expired(session)
        second = leases.claim_job(session, held.job_id, worker="w2", lease_seconds=60)
        assert not outputs.save_layer_profile(session, second, 0, profile("a"))
        assert len(outputs.list_layer_profiles(session, held.job_id)) == 1
        assert messages(session, held.job_id).count("profiled a") == 1


def test_the_allocation_is_published_once_and_whole(database, held, dense, factored):
    codes = Candidate(
        kind="quantized",
        bits=4,
        group_size=16,
        scale_bits=6,
        kept_parameters=64,
        stored_bytes=35,
        reconstruction_error=0.1,
        weight_error=0.2,
        loss=0.3,
    )
    blocks = codes.model_copy(update={"bits": None, "group_size": None, "scale_bits": None, "block_type": "Q4_K"})
    rounded = codes.model_copy(update={"kind": "low_rank", "rank": 3, "nnz": 24})
    factors = rounded.model_copy(update={"bits": None, "group_size": None, "scale_bits": None})
    chosen = [("a", factored), ("b", dense), ("c", codes), ("d", blocks), ("e", rounded), ("f", factors)]
    with database.transaction() as session:
        assert outputs.save_allocation(session, held, chosen)
        assert not outputs.save_allocation(session, held, [("a", dense)])
    with database.snapshot() as session:
        assert outputs.list_allocation(session, held.job_id) == chosen


def test_success_publishes_all_results_and_releases_the_job(database, held, report, result, artifact):
    with database.transaction() as session:
        ended = outputs.succeed_job(session, held, result=result, report=report, artifacts=[artifact], retention=WEEK)
        assert ended is Status.SUCCEEDED
    with database.snapshot() as session:
        job = jobs.get_job(session, held.job_id)
        assert (job.status, job.progress, job.fence, job.work_key) == ("succeeded", 1.0, None, None)
        assert JobResult.model_validate(job.result) == result
        assert CompressionReport.model_validate(outputs.find_report(session, job).body) == report
        found = outputs.find_artifact(session, job, artifact.name)
        assert (found.storage_key, found.size, found.sha256) == (artifact.storage_key, artifact.size, artifact.sha256)
        assert found.expires_at - found.created_at == WEEK
        for name in ("../etc/passwd", "", artifact.name + "\x00", "\ud800", artifact.name.upper()):
            with pytest.raises(ArtifactNotFoundError):
                outputs.find_artifact(session, job, name)


def test_a_job_being_cancelled_publishes_nothing_on_success(database, held, report, result, artifact):
    with database.transaction() as session:
        jobs.cancel_job(session, held.job_id)
        ended = outputs.succeed_job(session, held, result=result, report=report, artifacts=[artifact], retention=WEEK)
        assert ended is Status.CANCELLED
    with database.snapshot() as session:
        job = jobs.get_job(session, held.job_id)
        assert (job.status, job.result) == ("cancelled", None)
        # A retry may resume from the checkpoints.
        assert job.work_key is not None
        assert outputs.list_artifacts(session, job) == []
        assert outputs.find_report(session, job) is None


def test_inherited_layers_can_be_withdrawn_and_republished(database, held, submit, profile, dense, factored):
    other = submit()
    with database.transaction() as session:
        bystander = leases.claim_job(session, other, worker="w", lease_seconds=60)
        for lease in (held, bystander):
            outputs.save_layer_profile(session, lease, 0, profile("a"))
            outputs.save_allocation(session, lease, [("a", factored)])
    reason = NewEvent(type="message", level="warning", message="they are of no use")
    with database.transaction() as session:
        outputs.discard_layers(session, held, reason)
    with database.transaction() as session:
        assert outputs.list_layer_profiles(session, held.job_id) == []
        assert outputs.list_allocation(session, held.job_id) == []
        assert outputs.list_layer_profiles(session, other) == [profile("a")]
        assert outputs.list_allocation(session, other) == [("a", factored)]
        last = events.list_events(session, held.job_id)[-1]
        assert (last.message, last.level) == ("they are of no use", "warning")
        assert outputs.save_layer_profile(session, held, 0, profile("a"))
        assert outputs.save_allocation(session, held, [("a", dense)])


def test_a_job_has_the_expiry_of_its_artifacts(database, submit, result, report, artifact):
    job_ids = [submit(), submit()]
    with database.transaction() as session:
        claimed = [leases.claim_job(session, job_id, worker="w", lease_seconds=9) for job_id in job_ids]
        succeeded, cancelled = claimed
        jobs.cancel_job(session, cancelled.job_id)
        for lease in (succeeded, cancelled):
            new = artifact.model_copy(update={"storage_key": lease.fence})
            outputs.succeed_job(session, lease, result=result, report=report, artifacts=[new], retention=WEEK)
    with database.snapshot() as session:
        job = jobs.get_job(session, succeeded.job_id)
        assert job.expires_at == job.finished_at + WEEK
        assert {row.expires_at for row in outputs.list_artifacts(session, job)} == {job.expires_at}
        assert jobs.get_job(session, cancelled.job_id).expires_at is None
