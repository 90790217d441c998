"""Jobs that compress decoders whose head predicts no tokens, or that have none."""

import os
import threading

import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification, MistralModel, Qwen3ForTokenClassification

from app.shared.repositories import jobs, outputs, works
from app.shared.requests import ExportRequest, JobRequest
from rocket_core.report.schema import CompressionReport
from tests.reference.tiny_models import save_tiny_model, tiny_inputs
from tests.worker.threads import ThreadedAttempt as Attempt

CLASSES = {
    "mistral_embedding": MistralModel,
    "qwen3_tagger": Qwen3ForTokenClassification,
    "llama_reward": LlamaForSequenceClassification,
}
REQUEST = {"ratio": 0.5, "calibration": {"samples": 4, "sequence_length": 16}}
EVALUATE = {"evaluate": {"samples": 2, "sequence_length": 16}}


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id):
        Attempt(settings, database, claim(job_id), threading.Event()).run(os.getppid())
        job = look(job_id)
        assert (job.status, job.error) == ("succeeded", None)
        return job

    return attempt


@torch.no_grad()
def returned(model_class, folder):
    """Return what a model returns for some tokens, of the class that config.json names."""
    assert AutoConfig.from_pretrained(folder).architectures == [model_class.__name__]
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model(**tiny_inputs(model))[0]


@pytest.mark.parametrize("family", CLASSES)
def test_it_is_compressed_compared_by_drift_and_exported(
    family, settings, database, submit, attempt, published, tmp_path
):
    original = save_tiny_model(family, settings.models_folder / "tiny")
    source = attempt(submit(**REQUEST))
    attempt(submit(**REQUEST, **EVALUATE, source_job_id=source.id, on_source="evaluation"))
    with database.snapshot() as session:
        [evaluation] = works.list_work(session, source, "evaluation", limit=9)
        report = CompressionReport.model_validate(outputs.find_report(session, source).body)
        request = JobRequest.model_validate(jobs.get_job(session, source.id).request)
    assert evaluation.report.difference.cosine_drift > 0
    assert evaluation.report.difference.kl_divergence is None
    assert report.model_class == CLASSES[family].__name__
    with database.transaction() as session:
        job = jobs.create_job(session, ExportRequest(to="dense").job_request(source.id, request, None), max_attempts=5)
        export_id = job.job.id
    attempt(export_id)
    for job_id in (source.id, export_id):
        for name, content in published(job_id).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    before, stored, dense = (
        returned(CLASSES[family], folder) for folder in (original, tmp_path / "rocket", tmp_path / "dense")
    )
    torch.testing.assert_close(stored, dense, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(stored, before, atol=1e-2)
