"""`/jobs/{id}/link`: who creates and ends a link, and what is stored and recorded of it."""

import re

import pytest
from sqlalchemy import text

from app.shared.repositories import audit
from tests.app.api.conftest import BODY

pytestmark = pytest.mark.databases("sqlite", "postgres")

FILE = "rocket/model.safetensors"


@pytest.fixture
def alice(bearer):
    return bearer("alice")


@pytest.fixture
def job(client, worker, alice):
    job_id = client.post("/jobs", json=BODY, headers=alice).json()["id"]
    worker.succeed(job_id, {FILE: b"weights"})
    return f"/jobs/{job_id}"


@pytest.fixture
def recorded(context):
    def recorded():
        with context.database.snapshot() as session:
            events = audit.list_events(session, limit=100)[::-1]
        return [(each.action, each.subject, each.detail) for each in events if each.action.startswith("link.")]

    return recorded


def test_a_link_shows_the_job_until_it_is_ended(client, job, alice, recorded):
    made = client.post(f"{job}/link", json={}, headers=alice)
    assert made.status_code == 201
    url = made.json()["url"]
    assert re.fullmatch(r"http://localhost/ui/shared/rl_[0-9a-f]{16}_[0-9a-f]{64}", url)
    assert client.get(url).status_code == 200
    known = client.get(f"{job}/link", headers=alice).json()
    assert known == {"with_files": False, "created_at": made.json()["created_at"]}
    assert client.delete(f"{job}/link", headers=alice).status_code == 204
    assert client.get(url).status_code == 404
    for method in ("GET", "DELETE"):
        assert client.request(method, f"{job}/link", headers=alice).json()["code"] == "link_not_found"
    subject = job.rpartition("/")[2]
    assert recorded() == [("link.create", subject, {"with_files": 0}), ("link.delete", subject, {})]


def test_another_link_ends_the_first(client, job, alice, recorded):
    first, second = (
        client.post(f"{job}/link", json={"with_files": files}, headers=alice).json()["url"] for files in (False, True)
    )
    assert [client.get(url).status_code for url in (first, second)] == [404, 200]
    assert [action for action, _, _ in recorded()] == ["link.create", "link.delete", "link.create"]
    assert recorded()[-1][2] == {"with_files": 1}


def test_a_link_ends_with_its_job(client, job, alice):
    url = client.post(f"{job}/link", json={}, headers=alice).json()["url"]
    assert client.delete(job, headers=alice).status_code == 204
    assert client.get(url).status_code == 404


def test_the_token_is_not_stored(client, context, job, alice):
    token = client.post(f"{job}/link", json={}, headers=alice).json()["url"].rpartition("/")[2]
    secret = token.rpartition("_")[2]
    with context.database.snapshot() as session:
        rows = [*session.execute(text("SELECT * FROM links")), *session.execute(text("SELECT * FROM audit_events"))]
    assert len(rows) >= 2
    assert not [row for row in rows if secret in str(row)]


def test_only_owners_who_may_write_create_and_end_links(client, context, job, alice, bearer, recorded):
    url = client.post(f"{job}/link", json={}, headers=alice).json()["url"]
    before = recorded()
    for headers in (bearer("bob"), {}):
        for method in ("POST", "GET", "DELETE"):
            answer = client.request(
                method, f"{job}/link", headers=headers, **({"json": {}} if method == "POST" else {})
            )
            assert answer.status_code == (404 if headers else 401)
    assert client.get(url).status_code == 200
    assert recorded() == before


def test_a_job_without_a_result_has_nothing_to_show(client, alice, worker, job):
    queued = client.post("/jobs", json=BODY, headers=alice).headers["Location"]
    answer = client.post(f"{queued}/link", json={}, headers=alice)
    assert (answer.status_code, answer.json()["code"]) == (409, "report_not_ready")
