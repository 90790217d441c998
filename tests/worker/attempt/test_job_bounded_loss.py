"""A job with a bound on the loss, whose file llama.cpp loads."""

import os
import threading

import pytest

from app.shared.repositories import jobs, outputs, works
from app.shared.requests import EvaluationRequest, HealingRequest, JobRequest
from rocket_core.report.schema import CompressionReport
from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine
from tests.worker.threads import ThreadedAttempt as Attempt

REQUEST = {
    "ratio": None,
    "max_kl": 0.001,
    "calibration": {"samples": 4, "sequence_length": 32},
    "evaluate": {"samples": 4, "sequence_length": 32},
}


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id):
        Attempt(settings, database, claim(job_id), threading.Event()).run(os.getppid())
        job = look(job_id)
        assert (job.status, job.error) == ("succeeded", None)
        return job

    return attempt


def report_of(database, job):
    with database.snapshot() as session:
        return CompressionReport.model_validate(outputs.find_report(session, job).body)


def test_its_file_is_within_the_bound_and_runs(settings, database, submit, attempt, published, tmp_path):
    folder = settings.models_folder / "tiny"
    folder.mkdir(parents=True)
    gguf_models.save("llama", folder)
    options = {"engine": "llama.cpp", "export": ["gguf"]}
    job = attempt(submit(**REQUEST, options=options))
    report = report_of(database, job)
    assert report.evaluation.difference.kl_divergence <= 0.001
    assert report.rounds
    (tmp_path / "model.gguf").write_bytes(published(job.id)["gguf/model.gguf"])
    tokens, _ = Engine(tmp_path / "model.gguf").greedy("The module", 8)
    assert len(tokens) == 8


def test_its_result_can_be_measured_and_healed(settings, database, submit, attempt):
    folder = settings.models_folder / "tiny"
    folder.mkdir(parents=True)
    gguf_models.save("llama", folder)
    job = attempt(submit(**REQUEST))
    with database.snapshot() as session:
        request = JobRequest.model_validate(jobs.get_job(session, job.id).request)
    works_of = (EvaluationRequest(samples=2, sequence_length=16), HealingRequest(tokens=256, sequence_length=16))
    for work in works_of:
        with database.transaction() as session:
            made = jobs.create_job(session, work.job_request(job.id, request, None), max_attempts=5).job.id
        attempt(made)
    with database.snapshot() as session:
        [evaluation] = works.list_work(session, job, "evaluation", limit=9)
    assert evaluation.report.difference.kl_divergence >= 0
