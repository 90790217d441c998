"""A benchmark within a job, whose processes are confined as the job's are."""

import pytest

from app.shared.repositories import outputs
from rocket_core.report.speed import SpeedReport
from tests.reference import gguf_models
from worker.runner import Runner

pytestmark = pytest.mark.slow


def test_confined_processes_measure_original_and_export(settings, database, submit, look, messages):
    """llama.cpp runs without a socket, and the library is found without listing the checkout."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
    gguf_models.save("llama", settings.models_folder / "tiny")
    job_id = submit(
        ratio=None,
        bits=8.5,
        benchmark=True,
        options={"engine": "llama.cpp"},
        calibration={"samples": 2, "sequence_length": 16},
    )

    assert Runner(settings, database).run()

    job = look(job_id)
    assert (job.status, job.error) == ("succeeded", None)
    with database.snapshot() as session:
        speed = SpeedReport.model_validate(outputs.find_report(session, job).body["speed"])
    assert [(model.name, model.runtime) for model in speed.models] == [
        ("original", "transformers"),
        ("gguf", "llama.cpp"),
    ]
    assert speed.unmeasured == ()
    assert "benchmarking" in messages(job_id)
