"""What the audit log records of clients' actions, and what it does not."""

import json
import re

import pytest

from app.services.sessions import FailureBudget
from app.shared.errors import UploadNotFoundError
from app.shared.models import Job
from app.shared.repositories import audit, keys
from tests.app.api.conftest import BODY

CANARY = "canary-hunter2"
TEXT = {"Content-Type": "text/plain"}


@pytest.fixture
def key(context):
    with context.database.transaction() as session:
        return keys.create_key(session, "alice")


@pytest.fixture
def alice(key):
    return {"Authorization": f"Bearer {key.text}", "X-Request-Id": "the-request"}


@pytest.fixture
def events(context):
    def events(**choice):
        with context.database.snapshot() as session:
            return audit.list_events(session, **{"limit": 1000} | choice)[::-1]

    return events


def submit(client, headers, **more):
    body = BODY | {"metadata": {"label": CANARY}} | more
    return client.post("/jobs", json=body, headers=headers).json()["id"]


def test_each_action_is_recorded_once(client, worker, key, alice, events):
    job = submit(client, alice | {"Idempotency-Key": "k"})
    assert submit(client, alice | {"Idempotency-Key": "k"}) == job
    for _ in range(2):
        client.post(f"/jobs/{job}/cancel", headers=alice)
    retried = [client.post(f"/jobs/{job}/retry", headers=alice).json()["id"] for _ in range(2)]
    client.delete(f"/jobs/{job}", headers=alice)
    profile = worker.profile_model(retried[0])
    client.delete(f"/profiles/{profile}", headers=alice)
    for _ in range(2):
        uploaded = client.post("/calibrations", content=CANARY, headers=alice | TEXT).headers["Location"]
    client.delete(uploaded, headers=alice)
    upload = uploaded.rsplit("/", 1)[-1]
    assert [(event.action, event.subject) for event in events()] == [
        ("job.submit", job),
        ("job.cancel", job),
        ("job.retry", retried[0]),
        ("job.delete", job),
        ("profile.create", profile),
        ("profile.delete", profile),
        ("upload.create", upload),
        ("upload.delete", upload),
    ]
    by_alice = [event for event in events() if event.actor != "worker"]
    assert {(event.tenant, event.actor, event.address, event.request_id, event.outcome) for event in by_alice} == {
        ("alice", key.row.id, "127.0.0.1", "the-request", "success")
    }
    assert events()[0].detail == {"kind": "compression"}
    assert CANARY not in json.dumps([event.detail for event in events()])


def test_refused_actions_are_not_recorded(client, key, alice, events):
    missing = "job_" + "0" * 26
    assert client.post(f"/jobs/{missing}/cancel", headers=alice).status_code == 404
    assert client.delete(f"/jobs/{missing}", headers=alice).status_code == 404
    assert client.delete("/calibrations/" + "0" * 32, headers=alice).json()["code"] == UploadNotFoundError.code
    assert client.post("/jobs", json=BODY | {"ratio": 0.99}, headers=alice).status_code == 422
    assert events() == []


def test_an_action_and_its_event_are_one_transaction(client, context, events, monkeypatch):
    def fail(*_arguments, **_options):
        raise RuntimeError("no room")

    monkeypatch.setattr(audit, "record", fail)
    assert client.post("/jobs", json=BODY).status_code == 500
    with context.database.snapshot() as session:
        assert session.query(Job).count() == 0


def test_without_keys_the_actor_is_local(client, events):
    submit(client, {})
    [event] = events()
    assert (event.tenant, event.actor) == ("local", "local")


def test_signing_in_and_out_is_recorded(client, key, events):
    assert client.post("/ui/sign-in", data={"key": key.text}, follow_redirects=False).status_code == 303
    token = re.search(r'name="csrf" value="([^"]+)"', client.get("/").text)[1]
    for _ in range(2):
        client.post("/ui/sign-out", data={"csrf": token}, follow_redirects=False)
    session_id = events()[0].subject
    assert [(event.action, event.subject, event.outcome) for event in events()] == [
        ("session.sign_in", session_id, "success"),
        ("session.sign_out", session_id, "success"),
    ]
    assert {(event.tenant, event.actor, event.address) for event in events()} == {("alice", key.row.id, "127.0.0.1")}


def test_a_failed_sign_in_names_only_an_existing_key(client, context, key, events):
    wrong = f"rk_{key.row.id}_{'ab' * 32}"
    for text in (CANARY, "rk_" + "0" * 16 + "_" + "0" * 64, wrong):
        assert client.post("/ui/sign-in", data={"key": text}).status_code == 401
    named = ("alice", "unknown", key.row.id, "failure")
    unnamed = (None, "unknown", None, "failure")
    assert [(event.tenant, event.actor, event.subject, event.outcome) for event in events()] == [
        unnamed,
        unnamed,
        named,
    ]


def test_a_flood_of_failures_is_counted_instead_of_recorded(clock):
    budget = FailureBudget(clock)
    assert [budget.spend() for _ in range(40)] == [0] * 30 + [None] * 10
    clock.advance(60)
    assert [budget.spend() for _ in range(2)] == [10, 0]
