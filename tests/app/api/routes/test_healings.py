"""Jobs that heal the result of another job: what is accepted, and what it becomes."""

import pytest

from app.shared.repositories import outputs
from rocket_core.report.healing import HealingPoint
from tests.app.api.conftest import BODY

pytestmark = pytest.mark.databases("sqlite", "postgres")

FILES = {"rocket/model.safetensors": b"weights", "rocket/config.json": b"{}", "report.json": b"{}"}
UNKNOWN = "job_" + "0" * 26


@pytest.fixture
def finished(client, worker):
    body = BODY | {"calibration": {"samples": 8, "sequence_length": 16, "seed": 3}, "options": {"preset": "paper"}}
    job_id = client.post("/jobs", json=body).json()["id"]
    worker.succeed(job_id, FILES)
    return job_id


def heal(client, job_id, **body):
    return client.post(f"/jobs/{job_id}/healings", json={"tokens": 5000} | body)


def test_a_result_is_healed_as_it_was_made(client, finished):
    answer = heal(client, finished, metadata={"why": "quality"})
    job, before = answer.json(), client.get(f"/jobs/{finished}").json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["kind"], job["source_job_id"], job["status"]) == ("healing", finished, "queued")
    assert before["kind"] == "compression"
    assert before["source_job_id"] is None
    assert job["calibration"] == before["calibration"]
    assert job["options"] == before["options"] | {"heal_tokens": 5000}
    assert (job["ratio"], job["model_id"]) == (before["ratio"], before["model_id"])
    assert job["metadata"] == {"why": "quality"}


def test_it_may_be_healed_on_other_text(client, finished):
    job = heal(client, finished, sequence_length=32, seed=7, dataset="ptb").json()
    rows = {"column": None, "pack": True, "skip_bad_rows": False}
    assert job["calibration"] == {"dataset": "ptb", "samples": 8, "sequence_length": 32, "seed": 7} | rows


def test_one_key_makes_one_healing(client, finished):
    headers = {"Idempotency-Key": "k"}
    answers = [
        client.post(f"/jobs/{finished}/healings", json={"tokens": tokens}, headers=headers) for tokens in (9, 9, 8)
    ]
    assert [answer.status_code for answer in answers] == [202, 200, 422]
    assert answers[0].json()["id"] == answers[1].json()["id"]


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": "many"}, "tokens"),
        ({"dataset": "../secret"}, "dataset"),
        ({"tokens": 2**25}, "options.heal_tokens"),
    ],
)
def test_invalid_requests_name_the_member(client, finished, body, member):
    answer = heal(client, finished, **body)
    assert (answer.status_code, answer.json()["param"]) == (422, member)


def test_only_a_finished_result_can_be_healed(client, submitted):
    assert heal(client, submitted).json()["code"] == "job_state_conflict"
    assert heal(client, UNKNOWN).status_code == 404


def test_a_job_without_a_rocket_export_is_refused(client, worker):
    job_id = client.post("/jobs", json=BODY | {"options": {"export": ["dense"]}}).json()["id"]
    worker.succeed(job_id, {"dense/model.safetensors": b"weights"})
    answer = heal(client, job_id)
    assert answer.status_code == 422
    assert "only the export rocket can be healed" in answer.json()["detail"]


def test_a_profile_has_nothing_to_heal(client, worker):
    job_id = client.post("/profiles", json={"model_id": "local/tiny"}).json()["id"]
    lease = worker.claim(job_id)
    worker.save_profile(lease)
    worker.do(outputs.succeed_without_files, lease)
    assert heal(client, job_id).json()["code"] == "job_state_conflict"


def test_the_healed_job_cannot_be_deleted_meanwhile(client, finished):
    healed = heal(client, finished).json()["id"]
    refused = client.delete(f"/jobs/{finished}")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_state_conflict")
    client.post(f"/jobs/{healed}/cancel")
    assert client.delete(f"/jobs/{finished}").status_code == 204
    assert client.post(f"/jobs/{healed}/retry").status_code == 404


def test_a_compression_may_heal_its_own_result(client):
    job = client.post("/jobs", json=BODY | {"options": {"heal_tokens": 100}}).json()
    assert (job["kind"], job["options"]["heal_tokens"]) == ("compression", 100)
    assert client.post("/jobs", json=BODY | {"source_job_id": job["id"], "on_source": "healing"}).status_code == 422


def test_an_estimate_includes_healing(client):
    needs = [
        client.post("/estimates", json=BODY | {"options": {"heal_tokens": tokens}}).json() for tokens in (None, 1000)
    ]
    for member in ("memory_bytes", "disk_bytes"):
        assert needs[0][member] < needs[1][member]


def test_points_of_the_curve_are_events_once_and_in_order(client, submitted, worker):
    lease = worker.claim(submitted)
    first, second = HealingPoint(step=0, tokens=0, held_out=2.0), HealingPoint(step=5, tokens=50, training=1.0)
    after = second.model_copy(update={"training": None, "held_out": 0.5})
    published = [worker.do(outputs.save_healing_point, lease, point) for point in (first, second, first, second, after)]
    assert published == [True, True, False, False, True]
    events = [event for event in client.get(f"/jobs/{submitted}/events").json()["data"] if event["type"] == "healing"]
    assert [HealingPoint.model_validate(event["data"]) for event in events] == [first, second, after]
    assert events[1]["message"] == "healing: 50 tokens, training divergence 1.0000"
