"""A Hub token of a job: who uses it, where it is stored, and when it is deleted."""

import json
import logging

import pytest
from huggingface_hub import utils
from pydantic import SecretStr

from app.main import create_app
from app.shared.encryption import decrypt
from app.shared.models import Job
from app.shared.outcomes import JobError
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client
from tests.reference.fake_hub import FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

TOKEN = "hf_canary0123456789"  # noqa: S105 - no real one
SENT = {"Hub-Token": TOKEN}
HUB_BODY = BODY | {"model_id": "org/model"}


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        weights = safetensors_bytes(llama_tensors())
        fake.repositories["org/model"] = {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": weights,
            "tokenizer.json": b"{}",
        }
        yield fake
        utils.close_session()


@pytest.fixture
def stored(context):
    """Return the column of a job."""

    def stored(job_id):
        with context.database.snapshot() as session:
            return session.get_one(Job, job_id).hub_token

    return stored


def submit(client, body=HUB_BODY, headers=SENT):
    answer = client.post("/jobs", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


@pytest.mark.parametrize("path", ["/jobs", "/estimates"])
def test_hub_requests_use_the_clients_token(hub, settings, path):
    operated = settings.model_copy(update={"hf_token": SecretStr("hf_of_the_operator")})
    with local_client(create_app(operated)) as client:
        assert client.post(path, json=HUB_BODY, headers=SENT).status_code < 300
    assert {token for _, token, _ in hub.asked} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("token", ["", "x", "hf_", "hf_a b c d e", "hf_ümlaut", "hf_" + "a" * 4000, "Bearer hf_abcdef"])
def test_an_invalid_token_is_refused_and_not_echoed(client, token):
    answer = client.post("/jobs", json=HUB_BODY, headers={"Hub-Token": token.encode()})
    assert (answer.status_code, answer.json()["param"]) == (422, "Hub-Token")
    assert len(token) < 5 or token not in answer.text
    assert client.get("/jobs").json()["data"] == []


def test_the_token_is_stored_only_encrypted(client, settings, stored, caplog):
    caplog.set_level(logging.DEBUG)
    job_id = submit(client)
    assert decrypt(settings, stored(job_id)).get_secret_value() == TOKEN
    shown = [client.get(f"/jobs/{job_id}{part}").text for part in ("", "/events", "/layers", "/artifacts")]
    shown += [client.get("/jobs").text, caplog.text]
    files = [file.read_bytes() for file in settings.data_dir.rglob("*") if file.is_file()]
    assert any(stored(job_id).encode() in content for content in files)
    assert not [content for content in [*files, *(part.encode() for part in shown)] if b"canary" in content]
    assert stored(job_id) not in "".join(shown)


def test_the_token_is_not_part_of_a_requests_identity(client, stored):
    first = submit(client, headers=SENT | {"Idempotency-Key": "k"})
    kept = stored(first)
    again = client.post("/jobs", json=HUB_BODY, headers={"Hub-Token": "hf_another", "Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (200, first)
    assert stored(first) == kept


def test_a_job_without_hub_access_stores_no_token(client, stored):
    assert stored(submit(client, BODY)) is None
    assert stored(submit(client, BODY | {"calibration": {"dataset": "c4"}})) is not None


def test_the_token_is_deleted_when_the_job_ends(client, worker, stored):
    failed, cancelled, succeeded = (submit(client) for _ in range(3))
    worker.fail(failed, JobError(code="hub_unavailable", message="m", retryable=True))
    assert stored(failed) is not None
    worker.fail(failed, JobError(code="x", message="m"))
    client.post(f"/jobs/{cancelled}/cancel")
    worker.succeed(succeeded, {})
    assert [stored(job_id) for job_id in (failed, cancelled, succeeded)] == [None, None, None]


def test_a_retry_needs_its_own_token_and_reports_if_it_has_none(client, worker, stored, settings):
    job_id = submit(client)
    for headers, kept in (({}, None), ({}, None), (SENT, TOKEN)):
        worker.fail(job_id, JobError(code="x", message="m"))
        job_id = client.post(f"/jobs/{job_id}/retry", headers=headers).json()["id"]
        found = stored(job_id)
        assert (found and decrypt(settings, found).get_secret_value()) == kept
        told = [event["message"] for event in client.get(f"/jobs/{job_id}/events").json()["data"]]
        assert any("was forgotten" in message for message in told) == (kept is None)


def test_a_retry_of_a_job_without_token_does_not_mention_one(client, worker):
    job_id = submit(client, headers={})
    worker.fail(job_id, JobError(code="x", message="m"))
    retried = client.post(f"/jobs/{job_id}/retry").json()["id"]
    assert "oken" not in json.dumps(client.get(f"/jobs/{retried}/events").json())
