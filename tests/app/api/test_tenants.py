"""Two tenants at every endpoint: data of one do not exist for the other."""

import hashlib

import pytest

from app.shared.outcomes import JobError
from tests.app.api.conftest import BODY

HIDDEN = "only-alice-knows"
FILE = "rocket/model.safetensors"
METHODS = {"get", "post", "put", "patch", "delete"}


TEXT = f"text, {HIDDEN}".encode()
UPLOAD_ID = hashlib.sha256(TEXT).hexdigest()[:32]


@pytest.fixture
def alice(bearer):
    return bearer("alice")


@pytest.fixture
def bob(bearer):
    return bearer("bob")


@pytest.fixture
def profile_of_alice(client, worker, alice):
    return worker.profile_model(client.post("/jobs", json=BODY, headers=alice).json()["id"])


@pytest.fixture
def webhook_of_alice(client, alice):
    return client.post("/webhooks", json={"url": f"https://{HIDDEN}.example/"}, headers=alice).json()["id"]


@pytest.fixture
def jobs_of_alice(client, worker, alice):
    """Return one job in each relevant state, all with something to hide."""

    def make():
        body = BODY | {"metadata": {"about": HIDDEN}}
        return client.post("/jobs", json=body, headers=alice | {"Idempotency-Key": "k"}).json()["id"]

    def another():
        return client.post("/jobs", json=BODY | {"metadata": {"about": HIDDEN}}, headers=alice).json()["id"]

    made = {"queued": make(), "running": another(), "succeeded": another(), "failed": another()}
    assert client.post("/calibrations", content=TEXT, headers=alice | {"Content-Type": "text/plain"}).is_success
    announced = {"name": HIDDEN, "files": [{"path": path, "size": 2} for path in ("config.json", "a.safetensors")]}
    assert client.post("/models", json=announced, headers=alice).status_code == 201
    worker.claim(made["running"])
    worker.succeed(made["succeeded"], {FILE: HIDDEN.encode(), "report.json": b"{}"})
    assert client.post(f"/jobs/{made['succeeded']}/link", json={}, headers=alice).status_code == 201
    worker.fail(made["failed"], JobError(code="x", message=HIDDEN))
    return made


def operations(app):
    """Yield every method and path, whose parameters decide to whom the data belong."""
    for path, item in app.openapi()["paths"].items():
        for method in METHODS & set(item):
            yield method, path
        if "get" in item:
            yield "head", path


def filled(path, job_id, profile_id, webhook_id):
    # A route with another parameter belongs here, with a value that is alice's.
    values = {"job_id": job_id, "profile_id": profile_id, "name": FILE, "upload_id": UPLOAD_ID}
    return path.format(**values, model_name=HIDDEN, file="config.json", webhook_id=webhook_id)


def body_of(path):
    """Return the body for an endpoint that checks it before it looks for the object."""
    bodies = {
        "allocations": {"ratio": 0.1},
        "evaluations": {},
        "exports": {"to": "dense"},
        "healings": {"tokens": 5},
        "link": {},
        "pushes": {"repository": "a/b"},
    }
    body = bodies.get(path.rpartition("/")[2])
    return {} if body is None else {"json": body}


def test_no_endpoint_shows_or_changes_data_of_other_tenants(
    app, client, jobs_of_alice, profile_of_alice, webhook_of_alice, alice, bob
):
    lists = ("/jobs", "/profiles", "/webhooks")
    before = [client.get(path, headers=alice).json()["data"] for path in lists]
    asked = 0
    for method, path in operations(app):
        for job_id in jobs_of_alice.values() if "{" in path else [""]:
            for accept in ("*/*", "text/event-stream") if method == "get" else ("*/*",):
                url = filled(path, job_id, profile_of_alice, webhook_of_alice)
                headers = bob | {"Accept": accept, "Prefer": "wait=0", "Content-Range": "bytes 0-1/2"}
                answer = client.request(method, url, headers=headers, **body_of(path))
                assert HIDDEN not in answer.text, (method, path)
                assert profile_of_alice not in answer.text, (method, path)
                assert job_id == "" or job_id not in answer.text, (method, path)
                if "{" in path and answer.status_code != 405:
                    assert answer.status_code == 404, (method, path, answer.status_code)
                    asked += 1
    assert asked > 40
    for path, theirs in zip(lists, before, strict=True):
        assert client.get(path, headers=bob).json()["data"] == []
        # Nothing has happened to any of them.
        assert theirs
        assert client.get(path, headers=alice).json()["data"] == theirs


def test_owners_reach_their_data_at_every_endpoint(
    app, client, jobs_of_alice, profile_of_alice, webhook_of_alice, alice
):
    for method, path in operations(app):
        if "{" in path and method in {"get", "head"}:
            answer = client.request(
                method, filled(path, jobs_of_alice["succeeded"], profile_of_alice, webhook_of_alice), headers=alice
            )
            assert answer.status_code in {200, 405}, (method, path)
    for action, job in (("cancel", "queued"), ("retry", "failed")):
        assert client.post(f"/jobs/{jobs_of_alice[job]}/{action}", headers=alice).status_code in {200, 202}
    assert client.delete(f"/jobs/{jobs_of_alice['succeeded']}", headers=alice).status_code == 204


def test_data_of_other_tenants_looks_nonexistent(client, jobs_of_alice, bob):
    theirs, none = (
        client.get(f"/jobs/{job}", headers=bob).json() for job in (jobs_of_alice["queued"], "job_" + "0" * 26)
    )
    for problem in (theirs, none):
        problem.pop("request_id")
    assert theirs == none


def test_idempotency_keys_are_separate_for_each_tenant(client, jobs_of_alice, bob):
    body = BODY | {"metadata": {"about": HIDDEN}}
    answer = client.post("/jobs", json=body, headers=bob | {"Idempotency-Key": "k"})
    assert answer.status_code == 202
    assert answer.json()["id"] not in jobs_of_alice.values()


def test_lists_contain_only_the_tenants_own_jobs(client, jobs_of_alice, bob):
    mine = client.post("/jobs", json=BODY, headers=bob).json()["id"]
    newest = max(jobs_of_alice.values())
    assert client.get("/jobs", params={"after": newest}, headers=bob).json()["data"] == []
    assert [job["id"] for job in client.get("/jobs", headers=bob).json()["data"]] == [mine]
    labelled = client.get("/jobs", params={"metadata[about]": HIDDEN}, headers=bob)
    assert labelled.json()["data"] == []
