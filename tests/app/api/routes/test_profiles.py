"""Predictions for a model at any ratio from its profile alone."""

import numpy as np
import pytest
from sqlalchemy import inspect, select, update

from app.services import predictor_cache
from app.shared.models import Job, Profile
from app.shared.repositories import outputs
from rocket_core.allocation.allocator import chosen
from tests.app.api.conftest import BODY
from tests.reference.allocations import allocate

pytestmark = pytest.mark.databases("sqlite", soak=("postgres",))


@pytest.fixture
def profile_id(worker, submitted):
    return worker.profile_model(submitted)


@pytest.fixture
def ask(client, profile_id):
    return lambda **wanted: client.post(f"/profiles/{profile_id}/allocations", json=wanted)


def test_a_job_links_the_profile_it_made(client, submitted, profile_id):
    job = client.get(f"/jobs/{submitted}").json()
    assert job["profile_id"] == profile_id
    profile = client.get(f"/profiles/{profile_id}").json()
    assert (profile["object"], profile["model_id"], profile["layers"]) == ("profile", "local/tiny", 2)
    assert profile["calibration"] == job["calibration"]
    assert profile["options"] == job["options"]
    # The smallest candidates keep 52 of 128 parameters.
    assert profile["reachable_ratio"] == pytest.approx(1 - 52 / 128, abs=1e-4)
    told = [event for event in client.get(f"/jobs/{submitted}/events").json()["data"] if event["type"] == "profile"]
    assert [event["data"] for event in told] == [{"profile": profile_id}]
    assert all(client.get(path).status_code in {200, 405} for path in profile["links"].values())


def test_equal_profiles_are_stored_once_per_tenant(client, worker, profile_id, clock):
    again = client.post("/jobs", json=BODY | {"ratio": 0.5}).json()["id"]
    assert worker.profile_model(again) == profile_id
    other = worker.profile_model(client.post("/jobs", json=BODY).json()["id"], "e" * 64)
    assert other != profile_id
    listed = client.get("/profiles").json()
    assert [profile["id"] for profile in listed["data"]] == [other, profile_id]
    page = client.get("/profiles", params={"limit": 1}).json()
    assert ([profile["id"] for profile in page["data"]], page["has_more"]) == ([other], True)
    rest = client.get("/profiles", params={"limit": 1, "after": page["last_id"]}).json()
    assert ([profile["id"] for profile in rest["data"]], rest["has_more"]) == ([profile_id], False)


def test_a_repeated_attempt_adds_one_profile_event(worker, submitted, client, context):
    lease = worker.claim(submitted)
    for _ in range(2):
        worker.save_profile(lease)
    events = client.get(f"/jobs/{submitted}/events").json()["data"]
    assert [event["type"] for event in events].count("profile") == 1


def test_the_frontier_has_every_reachable_ratio(client, profile_id, model_profile):
    frontier = client.get(f"/profiles/{profile_id}/frontier").json()
    assert (frontier["objective"], frontier["budget"]) == ("whitened", "parameters")
    assert (frontier["compressible_parameters"], frontier["dense_bytes"]) == (128, 612)
    points = frontier["data"]
    assert [point["ratio"] for point in points[:-1]] == [step / 100 for step in range(60)]
    assert points[-1]["ratio"] == pytest.approx(1 - 52 / 128, abs=1e-4)
    for point in points:
        allocation = allocate(model_profile.layers, point["ratio"], objective="whitened", cap_slack=0.0, itemsize=4)
        picked = [candidate for _, candidate in chosen(model_profile.layers, allocation, itemsize=4)]
        assert point["error"] == allocation.total_error
        assert point["kept_parameters"] == sum(candidate.kept_parameters for candidate in picked)
        assert point["stored_bytes"] == sum(candidate.stored_bytes for candidate in picked)
        assert point["model_bytes"] == 100 + point["stored_bytes"]
    assert np.all(np.diff([point["error"] for point in points]) >= 0)


def test_the_answer_for_a_ratio_equals_the_allocation_of_a_job(ask, model_profile):
    answer = ask(ratio=0.2).json()
    allocation = allocate(model_profile.layers, 0.2, objective="whitened", cap_slack=0.0, itemsize=4)
    picked = chosen(model_profile.layers, allocation, itemsize=4)
    assert [(layer["name"], layer["chosen"]) for layer in answer["layers"]] == [
        (layer.name, candidate.model_dump(mode="json")) for layer, candidate in picked
    ]
    assert (answer["ratio"], answer["budget"], answer["proven"]) == (0.2, "parameters", True)
    assert answer["kept_parameters"] <= round(0.8 * 128)
    assert answer["error"] == allocation.total_error


def test_the_answer_for_a_size_is_the_best_model_within_it(ask):
    # 100 bytes of other weights, and layers of 256 or 120 bytes.
    for size, layers in ((612, [256, 256]), (10**12, [256, 256]), (611, [120, 256]), (476, [120, 256])):
        answer = ask(model_bytes=size).json()
        assert sorted(layer["chosen"]["stored_bytes"] for layer in answer["layers"]) >= layers
        assert answer["model_bytes"] == 100 + sum(layer["chosen"]["stored_bytes"] for layer in answer["layers"])
        assert answer["model_bytes"] <= size
        assert answer["budget"] == "bytes"
    for size in (339, 100, 0):
        answer = ask(model_bytes=size)
        assert (answer.status_code, answer.json()["code"]) == (422, "infeasible_budget")
        assert "340" in answer.json()["detail"]
    assert ask(model_bytes=340).status_code == 200


def test_the_answer_for_bits_is_the_best_model_within_them(ask):
    # Two layers of 64 parameters take 256 bytes, or 120 and more nonzeros: 32 bits per weight, or 15 and more.
    for bits, layers in ((16, 256), (15.5, 248), (15.49, 244), (15, 240)):
        answer = ask(bits=bits).json()
        assert sum(layer["chosen"]["stored_bytes"] for layer in answer["layers"]) == answer["stored_bytes"] == layers
        assert answer["budget"] == "bytes"
    answer = ask(bits=14.99)
    assert (answer.status_code, answer.json()["code"]) == (422, "infeasible_budget")
    assert "the selected layers take at least 15; ask for that or more" in answer.json()["detail"]


def test_the_answer_for_an_error_is_the_smallest_model_within_it(ask):
    exact, loose = ask(error=0).json(), ask(error=0.0101).json()
    assert (exact["error"], exact["ratio"]) == (0, 0)
    assert loose["error"] == pytest.approx(0.01)
    assert loose["kept_parameters"] < exact["kept_parameters"]
    assert ask(error=99).json()["ratio"] == pytest.approx(1 - 52 / 128, abs=1e-4)


@pytest.mark.parametrize(
    "wanted",
    [
        *({}, {"ratio": 0.1, "error": 1}, {"ratio": 1}, {"ratio": -0.1}, {"model_bytes": -1}, {"error": -1}),
        *({"size": 3}, {"bits": 0}, {"bits": 16.1}, {"bits": 15, "error": 1}),
    ],
)
def test_invalid_questions_to_a_profile_are_refused(ask, wanted):
    answer = ask(**wanted)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_an_unreachable_ratio_gets_the_nearest_one(ask):
    answer = ask(ratio=0.8)
    assert (answer.status_code, answer.json()["code"]) == (422, "infeasible_budget")
    assert ask(ratio=answer.json()["nearest_ratio"]).status_code == 200


def test_deleting_a_profile_leaves_its_jobs(client, submitted, profile_id, ask):
    assert ask(ratio=0.2).status_code == 200
    assert client.delete(f"/profiles/{profile_id}").status_code == 204
    # Although it is still cached in memory.
    assert ask(ratio=0.2).status_code == 404
    assert client.get(f"/profiles/{profile_id}").json()["code"] == "profile_not_found"
    assert client.get(f"/jobs/{submitted}").json()["profile_id"] is None


def test_beyond_the_limit_the_least_recent_profile_is_evicted(client, worker, submitted, app):
    app.state.context.settings.__dict__["max_profiles"] = 1
    lease = worker.claim(submitted)
    first = worker.save_profile(lease)
    worker.do(outputs.succeed_without_files, lease)
    asked = client.post("/profiles", json={"model_id": "local/tiny"})
    assert asked.status_code == 202
    second = worker.profile_model(asked.json()["id"], "e" * 64)
    assert [profile["id"] for profile in client.get("/profiles").json()["data"]] == [second]
    gone = client.get(f"/profiles/{first}")
    assert (gone.status_code, gone.json()["code"]) == (404, "profile_not_found")
    assert "recreates it" in gone.json()["detail"]
    assert client.get(f"/jobs/{submitted}").json()["profile_id"] is None


def test_a_profile_outlives_its_job(client, worker, submitted, profile_id):
    client.post(f"/jobs/{submitted}/cancel")
    with worker.context.database.transaction() as session:
        ended = {"status": "cancelled", "fence": None, "lease_until": None}
        session.execute(update(Job).where(Job.id == submitted).values(**ended))
    assert client.delete(f"/jobs/{submitted}").status_code == 204
    assert client.get(f"/profiles/{profile_id}/frontier").status_code == 200


def test_only_recent_profiles_are_cached_in_memory(client, worker, context, monkeypatch):
    read = []
    validate = type(worker.model_profile).model_validate
    monkeypatch.setattr(type(worker.model_profile), "model_validate", lambda body: read.append(body) or validate(body))
    ids = []
    for number in range(predictor_cache._HELD + 1):
        ids.append(worker.profile_model(client.post("/jobs", json=BODY).json()["id"], f"{number:064x}"))
    for profile_id in (ids[0], ids[0], ids[0]):
        client.get(f"/profiles/{profile_id}/frontier")
    assert len(read) == 1
    for profile_id in ids[1:]:
        client.get(f"/profiles/{profile_id}/frontier")
    client.get(f"/profiles/{ids[0]}/frontier")
    assert len(read) == len(ids) + 1


def test_lists_do_not_load_large_columns(client, context, profile_id):
    with context.database.snapshot() as session:
        row = session.scalars(select(Profile)).one()
        assert {"body", "frontier"} <= inspect(row).unloaded


def test_a_profile_can_be_requested_alone(client, worker):
    body = {name: value for name, value in BODY.items() if name != "ratio"}
    answer = client.post("/profiles", json=body, headers={"Idempotency-Key": "once"})
    job = answer.json()
    assert (answer.status_code, answer.headers["Location"]) == (202, f"/jobs/{job['id']}")
    assert (job["kind"], job["ratio"], job["target_bytes"]) == ("profile", None, None)
    again = client.post("/profiles", json=body, headers={"Idempotency-Key": "once"})
    assert (again.status_code, again.json()["id"]) == (200, job["id"])
    lease = worker.claim(job["id"])
    profile_id = worker.save_profile(lease)
    worker.do(outputs.succeed_without_files, lease)
    done = client.get(f"/jobs/{job['id']}").json()
    assert (done["status"], done["progress"], done["profile_id"]) == ("succeeded", 1.0, profile_id)
    assert done["result"] is done["error"] is done["expires_at"] is None
    assert client.get(f"/jobs/{job['id']}/artifacts").json()["data"] == []
    report = client.get(f"/jobs/{job['id']}/report")
    assert (report.status_code, report.json()["code"]) == (409, "report_not_ready")
    assert "profile jobs have no report" in report.json()["detail"]
    assert client.get("/jobs").json()["data"][0]["kind"] == "profile"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"ratio": 0.3}, "ratio"),
        ({"target_bytes": 1000}, "target_bytes"),
        ({"bits": 4}, "bits"),
        ({"evaluate": {}}, "evaluate"),
        ({"options": {"method": "svd-llm"}}, "body"),
        ({"model_id": "tiny"}, "model_id"),
    ],
)
def test_options_without_effect_on_a_profile_are_refused(client, change, param):
    body = {name: value for name, value in BODY.items() if name != "ratio"}
    answer = client.post("/profiles", json=body | change)
    assert (answer.status_code, answer.json()["param"]) == (422, param)
    assert client.get("/jobs").json()["data"] == []


def test_a_size_can_be_requested_instead_of_a_ratio(client):
    body = {name: value for name, value in BODY.items() if name != "ratio"}
    whole = client.post("/estimates", json=BODY).json()
    layers = {"options": BODY.get("options", {}) | {"include": []}}
    target = whole["stored_bytes"] - whole["compressible_parameters"]
    told = client.post("/estimates", json=body | layers | {"target_bytes": target}).json()
    # A quarter of four bytes per parameter, and what the names in the file take.
    assert 0.25 < told["ratio"] < 0.4
    assert told["factored_bytes"] == target
    # The same bytes are a smaller part of layers and embeddings together.
    smaller = client.post("/estimates", json=body | {"target_bytes": target}).json()
    assert 0 < smaller["ratio"] < told["ratio"]
    assert smaller["factored_bytes"] == target
    job = client.post("/jobs", json=body | {"target_bytes": target}).json()
    assert (job["kind"], job["ratio"], job["target_bytes"]) == ("compression", None, target)
    for change in ({}, {"target_bytes": 0}, {"ratio": 0.3, "target_bytes": target}, {"target_bytes": 1000}):
        for path in ("/jobs", "/estimates"):
            answer = client.post(path, json=body | change)
            assert answer.status_code == 422, change
    # The last change is an unreachable target.
    assert (answer.json()["code"], answer.json()["nearest_ratio"] > 0) == ("infeasible_budget", True)


def test_bits_can_be_requested_instead_of_a_ratio(client):
    body = {name: value for name, value in BODY.items() if name != "ratio"}
    whole = client.post("/estimates", json=BODY).json()
    parameters, stored = whole["compressible_parameters"], whole["stored_bytes"]
    told = client.post("/estimates", json=body | {"bits": 8}).json()
    # A quarter of four bytes per parameter is left, apart from names and shapes.
    assert told["ratio"] == pytest.approx(0.75)
    assert told["kept_parameters"] == parameters
    assert stored - 3 * parameters <= told["factored_bytes"] <= stored - 3 * parameters + 1024 * 14
    job = client.post("/jobs", json=body | {"bits": 8}).json()
    assert (job["kind"], job["ratio"], job["target_bytes"], job["bits"]) == ("compression", None, None, 8)
    assert job["options"]["budget"] == "bytes"
    assert client.get("/jobs").json()["data"][0]["bits"] == 8
    for change in ({"bits": 0}, {"bits": 16.5}, {"bits": 4, "ratio": 0.3}, {"bits": "many"}, {"bits": 0.5}):
        for path in ("/jobs", "/estimates"):
            answer = client.post(path, json=body | change)
            assert answer.status_code == 422, change
    # The last change is an unreachable target.
    assert (answer.json()["code"], answer.json()["nearest_ratio"] > 0) == ("infeasible_budget", True)
    coded = client.post("/jobs", json=body | {"bits": 4, "options": {"method": "gptq"}})
    assert "leave bits out, which is for other methods" in coded.json()["detail"]
