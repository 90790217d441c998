"""Jobs that heal: within a compression, and the result of an earlier job."""

import os
import threading

import pytest

from app.shared.errors import ArtifactExpiredError, ConflictError, JobNotFoundError
from app.shared.models import Artifact
from app.shared.repositories import jobs, outputs, sources, sweeps
from app.shared.requests import HealingRequest, JobRequest
from rocket_core.pipeline.state import healing_state
from rocket_core.report.schema import CompressionReport
from tests.worker.threads import ThreadedAttempt as Attempt
from worker.runner import Runner

TOKENS = 12000
REQUEST = {
    "calibration": {"samples": 8, "sequence_length": 16},
    "options": {"preset": "paper", "ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id, stop=None):
        Attempt(settings, database, claim(job_id), stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


@pytest.fixture
def heal(database, look):
    """Submit a job that heals the result of another one, as the API does."""

    def heal(job_id, owner="local", **changes):
        with database.transaction() as session:
            healed = JobRequest.model_validate(jobs.get_job(session, job_id).request)
            request = HealingRequest(tokens=TOKENS, **changes).job_request(job_id, healed, None)
            return jobs.create_job(session, request, max_attempts=5, owner=owner).job.id

    return heal


@pytest.fixture
def finished(submit, attempt, model):
    """Return a job whose result can be healed."""
    job_id = submit(**REQUEST)
    assert attempt(job_id).status == "succeeded"
    return job_id


def curve_of(database, job_id):
    with database.snapshot() as session:
        return tuple(outputs.list_healing_points(session, job_id))


def report_of(database, job):
    with database.snapshot() as session:
        return CompressionReport.model_validate(outputs.find_report(session, job).body)


def weights(files):
    return {name: content for name, content in files.items() if name.endswith(".safetensors")}


def test_a_result_is_healed_by_a_later_job(finished, heal, attempt, database, published, messages, work):
    healed = heal(finished)
    job = attempt(healed)
    assert (job.status, job.error, job.progress) == ("succeeded", None, 1.0)
    before, after = published(finished), published(healed)
    assert before.keys() == after.keys()
    assert {name: len(text) for name, text in weights(before).items()} == {
        name: len(text) for name, text in weights(after).items()
    }
    assert before["rocket/model.safetensors"] != after["rocket/model.safetensors"]
    report = report_of(database, job)
    assert report.healing.divergence_after < report.healing.divergence_before
    assert curve_of(database, healed) == report.healing.curve
    assert job.result["quality_is_measured"]
    assert "→" in job.result["quality"]
    stages = [text for text in messages(healed) if text in {"calibrating", "healing", "exporting"}]
    assert stages == ["healing", "exporting"]
    assert list(work.iterdir()) == []


def test_within_a_compression_it_is_the_same_healing(finished, heal, attempt, submit, database, published):
    together = submit(**(REQUEST | {"options": REQUEST["options"] | {"heal_tokens": TOKENS}}))
    afterwards = heal(finished)
    assert [attempt(job_id).status for job_id in (together, afterwards)] == ["succeeded", "succeeded"]
    name = "rocket/model.safetensors"
    assert published(together)[name] == published(afterwards)[name]
    assert curve_of(database, together) == curve_of(database, afterwards)


def test_killed_twice_it_ends_with_the_same_bytes(
    settings, finished, heal, attempt, database, program, look, published
):
    """The processes of both attempts are killed without warning, after other numbers of steps."""
    undisturbed = heal(finished)
    assert attempt(undisturbed).status == "succeeded"
    killed = heal(finished)
    for steps in (2, 4):
        mortal = program(f"""
        import functools, threading
        import rocket_core.pipeline.stages.healing.artifact as stage
        from rocket_core.pipeline.state import healing_state
        from tests.worker import threads
        from worker.attempt import job
        healing_state._SECONDS = healing_state._TIMES_ITS_COST = 0
        report = stage.Monitor.step
        def step(monitor, share, layer=None):
            report(monitor, share, layer)
            if layer and layer.startswith("step {steps} "):
                os.kill(os.getpid(), signal.SIGKILL)
        stage.Monitor.step = step
        sys.exit(job.main(sys.argv[1:], launch=lambda program, *_: threads.ChildThread(program, lambda: False)))
        """)
        assert Runner(settings, database, mortal).run()
        assert look(killed).status == "queued"
    points = curve_of(database, killed)
    assert points
    job = attempt(killed)
    assert (job.status, job.attempt) == ("succeeded", 3)
    assert weights(published(killed)) == weights(published(undisturbed))
    assert curve_of(database, killed) == curve_of(database, undisturbed) == report_of(database, job).healing.curve


def test_a_cancelled_healing_is_retried_from_its_checkpoint(
    finished, heal, attempt, database, cancel, retry, published, monkeypatch
):
    healed = heal(finished)
    save = healing_state.HealingState.save_checkpoint
    monkeypatch.setattr(healing_state, "_SECONDS", 0)
    stop = threading.Event()

    def save_and_stop(state, tensors):
        save(state, tensors)
        cancel(healed)
        stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(healing_state.HealingState, "save_checkpoint", save_and_stop)
        assert attempt(healed, stop).status == "cancelled"
    again = retry(healed)
    assert attempt(again).status == "succeeded"
    assert len(curve_of(database, again)) > len(curve_of(database, healed))
    whole = heal(finished)
    attempt(whole)
    assert weights(published(again)) == weights(published(whole))


def test_what_a_job_heals_is_kept_until_it_has_ended(finished, heal, attempt, database, cancel, settings):
    healed = heal(finished)
    with database.transaction() as session:
        for artifact in session.query(Artifact).filter(Artifact.job_id == finished):
            artifact.expires_at = artifact.created_at
    with database.transaction() as session:
        assert sweeps.expire_artifacts(session) == []
        with pytest.raises(ConflictError, match="works on the result"):
            jobs.delete_job(session, finished)
    cancel(healed)
    with database.transaction() as session:
        assert sweeps.expire_artifacts(session)
        with pytest.raises(ArtifactExpiredError, match="compress again"):
            sources.find_source(session, "local", finished, "rocket")
        jobs.delete_job(session, finished)


def test_other_tenants_cannot_heal_a_result(finished, heal, attempt):
    with pytest.raises(JobNotFoundError):
        heal(finished, owner="somebody")


def test_an_unfinished_job_has_nothing_to_heal(submit, heal, model):
    with pytest.raises(ConflictError, match="succeeded"):
        heal(submit(**REQUEST))
