"""`rocket export-job`: what is asked of the server."""

from tests.rocket_cli.fakes import build_report

FILES = {"rocket/model.safetensors": b"weights", "report.json": b"{}"}


def test_the_result_of_a_job_is_exported_by_another(remote, client, service):
    source = service.succeeded(FILES, report=build_report().model_copy(update={"exports": ()}))
    outcome = remote("export-job", source, "--to", "dense", "--metadata", "a=b")

    job = client.exports(source)[0]
    assert (outcome.code, outcome.out) == (0, f"{job.id}\n")
    assert (job.kind, job.source_job_id, job.export_to, job.metadata) == ("export", source, "dense", {"a": "b"})
    assert f"rocket watch {job.id}" in outcome.err
    assert "as dense" in remote("jobs").out


def test_a_format_that_cannot_hold_it_is_an_error(remote, service):
    outcome = remote("export-job", service.succeeded(FILES), "--to", "gguf")

    assert outcome.code == 3
    assert "whose weight is a product of two factors; compress" in outcome.err


def test_a_word_that_is_no_format_is_refused(remote, service):
    outcome = remote("export-job", service.submit(), "--to", "onnx")

    assert outcome.code == 2
    assert "'onnx' is not one of 'dense', 'gguf'" in outcome.err
