"""`rocket heal-job` and `--heal`: what is asked of the server."""

import pytest

from rocket_cli.compression_options import LocalOptions

FILES = {"rocket/model.safetensors": b"weights", "report.json": b"{}"}


@pytest.fixture
def job_id(service):
    return service.succeeded(FILES)


def test_the_result_of_a_job_is_healed_by_another(remote, client, job_id):
    outcome = remote("heal-job", job_id, "--tokens", "1.5M", "--sequence-length", "64", "--metadata", "a=b")

    job = client.list_jobs().data[0]
    assert (outcome.code, outcome.out) == (0, f"{job.id}\n")
    assert (job.kind, job.source_job_id, job.options["heal_tokens"]) == ("healing", job_id, 1_500_000)
    assert (job.calibration.sequence_length, job.metadata) == (64, {"a": "b"})
    assert f"rocket watch {job.id}" in outcome.err


def test_a_misspelt_dataset_gets_a_suggestion(remote, job_id):
    outcome = remote("heal-job", job_id, "--calibration", "local/mnie.jsonl")

    assert outcome.code == 3
    assert "did you mean local/mine.jsonl?" in outcome.err


def test_a_job_without_result_is_an_error(remote, service):
    outcome = remote("heal-job", service.submit())

    assert outcome.code != 0
    assert "only the result of a succeeded job can be used" in outcome.err


def test_submitted_jobs_may_heal_their_result(remote, client):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--heal", "2M")

    assert outcome.code == 0
    assert client.list_jobs().data[0].options["heal_tokens"] == 2_000_000


def test_a_compression_may_heal_its_result():
    assert LocalOptions(ratio=0.3, heal=500_000).config().healing.tokens == 500_000
    assert LocalOptions(ratio=0.3).config().healing is None
