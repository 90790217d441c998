"""Jobs that push the files of another job to the Hub: what is accepted, with whose token, and what is shown of it."""

import json
import logging

import pytest
from huggingface_hub import constants
from pydantic import SecretStr

from app.main import create_app
from app.shared.encryption import decrypt
from app.shared.models import Job
from app.shared.outcomes import JobError
from app.shared.repositories import leases, outputs, works
from rocket_core.report.push import PushReport
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client
from tests.reference.reports import report_of_layers

pytestmark = pytest.mark.databases("sqlite", "postgres")

UNKNOWN = "job_" + "0" * 26
TOKEN = "hf_canary0123456789"  # noqa: S105 - no real one
OPERATORS = "hf_operator0123456789"
SENT = {"Hub-Token": TOKEN}
REPO = "alice/small"
FILES = {"rocket/model.safetensors": b"weights", "rocket/config.json": b"{}"}
PUSHED = PushReport(
    repository=REPO, url=f"https://hub/{REPO}", commit="c0ffee", is_new=True, export="rocket", files=2, size=9
)


@pytest.fixture(autouse=True)
def _no_own_token(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))


@pytest.fixture
def finish(client, worker):
    """Return a job that has succeeded with these files."""

    def finish(files=FILES, **body):
        worker.report = report_of_layers()
        job_id = client.post("/jobs", json=BODY | body).json()["id"]
        worker.succeed(job_id, files)
        return job_id

    return finish


@pytest.fixture
def stored(context):
    """Return the token of a job as its column has it."""

    def stored(job_id):
        with context.database.snapshot() as session:
            return session.get_one(Job, job_id).hub_token

    return stored


def push(client, job_id, headers=SENT, **body):
    return client.post(f"/jobs/{job_id}/pushes", json={"repository": REPO} | body, headers=headers)


def test_the_files_of_a_job_are_pushed_by_another(client, finish, worker):
    finished = finish()
    answer = push(client, finished, private=True, metadata={"why": "a friend"})
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["kind"], job["source_job_id"], job["metadata"]) == ("push", finished, {"why": "a friend"})
    assert job["push"] == {"repository": REPO, "private": True, "export": "rocket"}
    assert client.get(f"/jobs/{job['id']}/report").json()["detail"].startswith("push jobs have no report")
    listed = f"/jobs/{finished}/pushes"
    assert client.get(listed).json()["data"] == [{"job": job, "report": None}]
    worker.do(works.save_report, worker.claim(job["id"]), PUSHED)
    assert client.get(listed).json()["data"][0]["report"] == PUSHED.model_dump()
    events = client.get(f"/jobs/{job['id']}/events").json()["data"]
    assert events[-1]["data"] == {"repository": REPO, "url": PUSHED.url, "commit": PUSHED.commit}
    assert client.get(f"/jobs/{finished}/exports").json()["data"] == []


def test_one_key_makes_one_push(client, finish):
    job_id, headers = finish(), SENT | {"Idempotency-Key": "k"}
    answers = [push(client, job_id, headers, repository=name) for name in (REPO, REPO, "alice/other")]
    assert [answer.status_code for answer in answers] == [202, 200, 422]
    assert answers[0].json()["id"] == answers[1].json()["id"]


@pytest.mark.parametrize("name", ["small", "a/b/c", "a b/c", "a/..", "a/b--c", "https://hub/a/b", "", None, "é/a"])
def test_invalid_repositories_name_the_member(client, finish, name):
    answer = push(client, finish(), repository=name)
    assert (answer.status_code, answer.json()["param"]) == (422, "repository")


def test_the_export_is_chosen_among_those_of_the_job(client, finish):
    both = finish({"dense/config.json": b"{}", "gguf/model.gguf": b"x", "report.json": b"{}"})
    chosen = [push(client, both, **body).json()["push"]["export"] for body in ({}, {"export": "dense"})]
    assert chosen == ["gguf", "dense"]
    answer = push(client, both, export="rocket")
    assert (answer.status_code, answer.json()["param"]) == (422, "export")
    assert "it has gguf, dense" in answer.json()["detail"]


def test_only_files_that_exist_can_be_pushed(client, submitted, finish, worker):
    assert push(client, submitted).json()["code"] == "job_state_conflict"
    assert push(client, UNKNOWN).status_code == 404
    pushed = push(client, finish()).json()["id"]
    worker.do(outputs.succeed_without_files, worker.claim(pushed))
    assert push(client, pushed).json()["code"] == "job_state_conflict"


def test_the_files_of_an_export_can_be_pushed(client, finish, worker):
    made = client.post(f"/jobs/{finish()}/exports", json={"to": "dense"}).json()["id"]
    worker.succeed(made, {"dense/model.safetensors": b"weights"})
    job = push(client, made).json()
    assert (job["push"]["export"], job["export_to"]) == ("dense", None)


def test_a_push_needs_a_token(client, finish):
    answer = push(client, finish(), headers={})
    assert (answer.status_code, answer.json()["code"]) == (422, "hub_token_invalid")
    assert "send one as Hub-Token" in answer.json()["detail"]


def test_the_only_user_may_use_the_token_of_the_server(settings, finish, stored):
    job_id = finish()
    with local_client(create_app(settings.model_copy(update={"hf_token": SecretStr(OPERATORS)}))) as client:
        own, sent = (push(client, job_id, headers).json()["id"] for headers in ({}, SENT))
    assert [decrypt(settings, stored(made)).get_secret_value() for made in (own, sent)] == [OPERATORS, TOKEN]


def test_a_key_never_gives_the_token_of_the_server(settings, bearer, finish, stored):
    job_id = finish()
    # The same tenant, whose jobs the first key takes over from a service without keys.
    mine = bearer("local")
    with local_client(create_app(settings.model_copy(update={"hf_token": SecretStr(OPERATORS)}))) as client:
        answer = push(client, job_id, mine)
        assert (answer.status_code, answer.json()["code"]) == (422, "hub_token_invalid")
        assert "your own Hub token" in answer.json()["detail"]
        made = push(client, job_id, mine | SENT).json()["id"]
        assert push(client, job_id, bearer("bob") | SENT).status_code == 404
    assert decrypt(settings, stored(made)).get_secret_value() == TOKEN


def test_offline_servers_refuse_pushes(client, finish, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answer = push(client, finish())
    assert (answer.status_code, answer.json()["code"]) == (503, "hub_unavailable")
    assert "download the files" in answer.json()["detail"]


def test_the_token_is_encrypted_shown_nowhere_and_deleted(client, finish, worker, settings, stored, caplog):
    caplog.set_level(logging.DEBUG)
    finished = finish()
    job_id = push(client, finished).json()["id"]
    assert decrypt(settings, stored(job_id)).get_secret_value() == TOKEN
    shown = [client.get(f"/jobs/{job_id}{part}").text for part in ("", "/events")]
    shown += [client.get(f"/jobs/{finished}/pushes").text, caplog.text]
    assert "canary" not in "".join(shown)
    assert stored(job_id) not in "".join(shown)
    worker.fail(job_id, JobError(code="hub_forbidden", message="m"))
    assert stored(job_id) is None


def test_a_retry_needs_a_token_again(client, finish, worker, settings, stored):
    job_id = push(client, finish()).json()["id"]
    worker.fail(job_id, JobError(code="hub_forbidden", message="m"))
    assert client.post(f"/jobs/{job_id}/retry").json()["code"] == "hub_token_invalid"
    again = client.post(f"/jobs/{job_id}/retry", headers=SENT)
    assert again.status_code == 202
    assert decrypt(settings, stored(again.json()["id"])).get_secret_value() == TOKEN


def test_the_pushed_job_cannot_be_deleted_meanwhile(client, finish):
    finished = finish()
    made = push(client, finished).json()["id"]
    assert client.delete(f"/jobs/{finished}").status_code == 409
    assert client.post(f"/jobs/{made}/cancel").json()["status"] == "cancelled"
    assert client.delete(f"/jobs/{finished}").status_code == 204


def test_a_published_push_never_changes(client, finish, worker, context):
    job_id = push(client, finish()).json()["id"]
    lease = worker.claim(job_id)
    with context.database.transaction() as session:
        assert works.save_report(session, lease, PUSHED)
        other = PUSHED.model_copy(update={"commit": "f00d"})
        assert not works.save_report(session, lease, other)
        assert works.find_report(session, leases.lock_leased_job(session, lease)) == PUSHED


def test_the_record_of_a_job_names_its_pushes(client, finish):
    finished = finish()
    assert client.get(f"/jobs/{finished}").json()["links"]["pushes"] == f"/jobs/{finished}/pushes"
    assert json.loads(client.get(f"/jobs/{finished}").text)["push"] is None
