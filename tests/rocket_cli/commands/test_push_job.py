"""`rocket push-job`: what is asked of the server."""

import pytest
from huggingface_hub import constants

from tests.rocket_cli.fakes import build_report

FILES = {"rocket/model.safetensors": b"weights", "gguf/model.gguf": b"x", "report.json": b"{}"}
REPO, TOKEN = "alice/small", "hf_canary0123456789"


@pytest.fixture
def source(service, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("MINE", TOKEN)
    return service.succeeded(FILES, report=build_report())


def test_the_files_of_a_job_are_pushed_by_another(remote, client, source):
    outcome = remote("push-job", source, REPO, "--private", "--hub-token-env", "MINE", "--metadata", "a=b")

    (push,) = client.pushes(source)
    assert (outcome.code, outcome.out) == (0, f"{push.job.id}\n")
    assert (push.job.kind, push.job.metadata, push.report) == ("push", {"a": "b"}, None)
    assert (push.job.push.repository, push.job.push.private, push.job.push.export) == (REPO, True, "rocket")
    assert f"rocket watch {push.job.id}" in outcome.err
    assert f"to {REPO}" in remote("jobs").out
    assert TOKEN not in outcome.out + outcome.err


def test_the_export_can_be_chosen(remote, client, source):
    assert remote("push-job", source, REPO, "--export", "gguf", "--hub-token-env", "MINE").code == 0
    assert client.pushes(source)[0].job.push.export == "gguf"
    outcome = remote("push-job", source, REPO, "--export", "dense", "--hub-token-env", "MINE")
    assert outcome.code == 2
    assert "it has rocket, gguf" in outcome.err


def test_without_a_token_the_message_says_how_to_send_one(remote, source):
    outcome = remote("push-job", source, REPO)

    assert outcome.code == 77
    assert "--hub-token-env" in outcome.err


def test_a_name_without_namespace_is_refused(remote, source):
    outcome = remote("push-job", source, "small", "--hub-token-env", "MINE")

    assert outcome.code == 2
    assert "namespace/name" in outcome.err
