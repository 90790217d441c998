"""A job that evaluates the artifact of an earlier one."""

import os
import threading

import pytest

from app.shared.errors import ArtifactExpiredError, ConflictError
from app.shared.models import Artifact
from app.shared.outcomes import JobResult
from app.shared.repositories import jobs, works
from app.shared.storage import open_store
from rocket_core.report.schema import CompressionReport
from tests.worker.threads import ThreadedAttempt as Attempt
from worker.attempt.earlier_artifact import fetch_earlier_artifact

REQUEST = {
    "calibration": {"samples": 2, "sequence_length": 16},
    "evaluate": {"samples": 2, "sequence_length": 16, "prompts": ["The"], "answer_tokens": 3},
}


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id, stop=None):
        Attempt(settings, database, claim(job_id), stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


@pytest.fixture
def source(model, submit, attempt):
    job = attempt(submit(**REQUEST))
    assert job.status == "succeeded"
    return job


@pytest.fixture
def reports(database):
    def reports(source):
        with database.snapshot() as session:
            return [found.report for found in works.list_work(session, source, "evaluation", limit=9)]

    return reports


def test_a_later_evaluation_equals_that_of_the_compression(source, submit, attempt, reports, published, work, messages):
    job = attempt(submit(**REQUEST, source_job_id=source.id, on_source="evaluation"))
    assert (job.status, job.progress, job.result, job.error) == ("succeeded", 1.0, None, None)
    stages = {"downloading", "preflight", "calibrating", "evaluating"}
    assert [message for message in messages(job.id) if message in stages] == ["downloading", "preflight", "evaluating"]
    report = CompressionReport.model_validate_json(published(source.id)["report.json"])
    assert reports(source) == [report.evaluation]
    assert report.evaluation.answers[0].prompt == "The"
    assert published(job.id) == {}
    assert list(work.iterdir()) == []


def test_a_job_with_bounds_succeeds_with_a_verdict(model, submit, attempt, published):
    job = attempt(submit(**REQUEST, accept={"max_kl": 1e-9}))
    report = CompressionReport.model_validate_json(published(job.id)["report.json"])
    assert (job.status, job.error) == ("succeeded", None)
    assert report.verdict.bounds[0].measured == report.evaluation.difference.kl_divergence > 1e-9
    assert JobResult.model_validate(job.result).verdict == report.verdict
    exported = attempt(
        submit(**REQUEST | {"evaluate": None}, source_job_id=job.id, on_source="export", export_to="dense")
    )
    assert JobResult.model_validate(exported.result).verdict == report.verdict


def test_an_earlier_artifact_is_fetched_once_while_it_exists(
    source, submit, attempt, look, settings, database, reports, published, tmp_path
):
    job_id = submit(**REQUEST, source_job_id=source.id, on_source="evaluation")
    stop = threading.Event()
    stop.set()
    assert attempt(job_id, stop).status == "queued"
    assert reports(source) == [None]

    def fetch(store):
        shares = []
        options = {"before_each": shares.append}
        return fetch_earlier_artifact(database, store, look(job_id), "rocket", tmp_path, **options), shares

    folder, shares = fetch(open_store(settings))
    fetched = {f"rocket/{file.name}": file.read_bytes() for file in folder.iterdir()}
    assert fetched == {name: data for name, data in published(source.id).items() if name.startswith("rocket/")}
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert fetch(None)[0] == folder

    with database.transaction() as session:
        session.get(Artifact, (source.id, "rocket/config.json")).storage_key = None
    with pytest.raises(ArtifactExpiredError, match="compress again"):
        fetch(None)
    with database.transaction() as session, pytest.raises(ConflictError, match="works on the result"):
        jobs.delete_job(session, source.id)
    job = attempt(job_id)
    assert (job.status, job.error["code"]) == ("failed", "artifact_expired")
    with database.transaction() as session:
        jobs.delete_job(session, source.id)
    assert look(job_id).source_job_id is None
