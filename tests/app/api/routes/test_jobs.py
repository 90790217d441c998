import json

import pytest

from app.main import create_app
from app.shared.errors import StorageError
from app.shared.models import WebhookDelivery
from app.shared.outcomes import JobError
from app.shared.repositories import outputs
from rocket_core.report.verdict import MeasuredBound, Verdict
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client

pytestmark = pytest.mark.databases("sqlite", "postgres")

BROKEN = JobError(code="calibration_empty", message="too little text", stage="calibrating")
UNKNOWN = "job_" + "0" * 26
BOUND = MeasuredBound(name="max_kl", bound=0.05, measured=0.5)
REGRESSED = Verdict(outcome="regressed", bounds=(BOUND,), reasons=(BOUND.text,))


def test_an_accepted_job_has_a_location_and_a_retry_after(client):
    answer = client.post("/jobs", json=BODY)
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/jobs/{job['id']}" == job["links"]["self"]
    assert int(answer.headers["Retry-After"]) > 0
    assert (job["object"], job["status"], job["progress"], job["attempt"]) == ("job", "queued", 0.0, 0)
    assert client.get(answer.headers["Location"]).json() == job


def test_a_job_has_the_documented_members(client, submitted):
    assert set(client.get(f"/jobs/{submitted}").json()) == {
        *("id", "object", "status", "stage", "progress", "model_id", "revision", "ratio", "calibration", "options"),
        *("metadata", "created_at", "started_at", "finished_at", "estimated_finish_at", "attempt", "retry_of"),
        *("error", "result", "links", "queue", "expires_at", "evaluate", "profile_id", "kind", "target_bytes"),
        *("bits", "benchmark", "accept", "source_job_id", "export_to", "push", "warnings"),
        *("max_kl", "max_perplexity_increase", "fit"),
    }


def test_a_new_job_has_its_queue_and_triggers_on_queued(settings):
    queued = []
    application = create_app(settings.model_copy(update={"default_queue": "gpu"}), on_queued=lambda: queued.append(1))
    with local_client(application) as client:
        answers = [client.post("/jobs", json=BODY | asked).json() for asked in ({}, {"queue": "cpu"})]
        assert [job["queue"] for job in answers] == ["gpu", "cpu"]
        assert client.post("/jobs", json=BODY | {"queue": "tpu"}).status_code == 422
        assert len(queued) == 2
        client.post(f"/jobs/{answers[0]['id']}/cancel")
        assert client.post(f"/jobs/{answers[0]['id']}/retry").json()["queue"] == "gpu"
        assert len(queued) == 3


def test_defaults_are_applied(client):
    job = client.post("/jobs", json=BODY).json()
    assert job["options"]["export"] == ["rocket"]
    assert (job["options"]["preset"], job["options"]["objective"]) == ("fast", "fisher")
    rows = {"column": None, "pack": True, "skip_bad_rows": False}
    assert job["calibration"] == {"dataset": "builtin", "samples": 256, "sequence_length": None, "seed": 0} | rows


def test_a_verdict_is_part_of_the_result_and_of_webhooks(client, worker, context):
    client.post("/webhooks", json={"url": "https://example.org/hook"})
    asked = {"evaluate": {}, "accept": {"max_kl": 0.05}}
    answer = client.post("/jobs", json=BODY | asked)
    assert answer.status_code == 202
    job_id = answer.json()["id"]
    assert answer.json()["accept"] == {"max_kl": 0.05, "max_perplexity_increase": None, "max_task_drop": None}
    worker.result = worker.result.model_copy(update={"verdict": REGRESSED})
    worker.succeed(job_id, {"report.json": b"{}"})
    job = client.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["error"]) == ("succeeded", None), "a verdict is not a failure"
    assert job["result"]["verdict"] == {
        "outcome": "regressed",
        "bounds": [{"name": "max_kl", "bound": 0.05, "measured": 0.5, "task": None}],
        "reasons": ["KL divergence 0.5 nats per token, at most 0.05 accepted"],
    }
    with context.database.snapshot() as session:
        (row,) = session.query(WebhookDelivery).all()
    assert (row.body["type"], row.body["data"]["result"]) == ("job.succeeded", job["result"])


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"accept": {"max_kl": 0}}, "accept.max_kl", "Input should be greater than 0"),
        ({"accept": {"max_kl": -1}}, "accept.max_kl", "Input should be greater than 0"),
        ({"accept": {"max_kl": "0.1"}}, "accept.max_kl", "Input should be a valid number"),
        ({"accept": {"max_perplexity_increase": 2}}, "accept.max_perplexity_increase", "for 2 %, write 0.02"),
        ({"accept": {"max_kll": 1}}, "accept.max_kll", "Extra inputs are not permitted"),
        ({"accept": {}}, "accept", "give at least one of max_kl"),
        ({"accept": {"max_task_drop": 0.1}}, "body", "settings: accept.max_task_drop is about zero-shot tasks"),
        ({"accept": {"max_kl": 1}, "evaluate": None}, "body", "none is requested: add evaluate"),
    ],
)
def test_bounds_that_cannot_be_judged_are_refused(client, asked, param, said):
    answer = client.post("/jobs", json=BODY | {"evaluate": {}} | asked)
    assert (answer.status_code, answer.json()["param"]) == (422, param)
    assert said in answer.json()["detail"]


def test_the_same_request_under_one_key_makes_one_job(client):
    headers = {"Idempotency-Key": "k1"}
    first = client.post("/jobs", json=BODY, headers=headers)
    # The draft standard's quotes mean the same key.
    second = client.post("/jobs", json=BODY, headers={"Idempotency-Key": '"k1"'})
    assert (first.status_code, second.status_code) == (202, 200)
    assert second.headers["Idempotent-Replayed"] == "true"
    assert first.json()["id"] == second.json()["id"]
    assert len(client.get("/jobs").json()["data"]) == 1


def test_a_replay_is_answered_after_the_model_has_gone(client, settings):
    headers = {"Idempotency-Key": "k1"}
    first = client.post("/jobs", json=BODY, headers=headers)
    settings.models_folder.rename(settings.data_dir / "moved")
    assert client.post("/jobs", json=BODY, headers=headers).json()["id"] == first.json()["id"]
    assert client.post("/jobs", json=BODY).status_code == 422


def test_an_idempotency_key_with_another_request_is_refused(client):
    headers = {"Idempotency-Key": "k1"}
    client.post("/jobs", json=BODY, headers=headers)
    answer = client.post("/jobs", json=BODY | {"ratio": 0.4}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("key", ["", " ", '""', "x" * 256, "tab\tinside"])
def test_an_invalid_idempotency_key_is_refused(client, key):
    answer = client.post("/jobs", json=BODY, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["param"]) == (422, "Idempotency-Key")


def test_the_list_pages_from_newest_to_oldest(client):
    made = [client.post("/jobs", json=BODY).json()["id"] for _ in range(3)]
    first = client.get("/jobs", params={"limit": 2}).json()
    second = client.get("/jobs", params={"limit": 2, "after": first["last_id"]}).json()
    assert (first["object"], first["has_more"], second["has_more"]) == ("list", True, False)
    listed = [job["id"] for job in first["data"] + second["data"]]
    assert sorted(listed) == sorted(made)
    assert listed == sorted(listed, reverse=True)
    assert (first["first_id"], first["last_id"]) == (listed[0], listed[1])


def test_an_empty_list_is_a_list(client):
    empty = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    assert client.get("/jobs").json() == empty


def test_jobs_can_be_filtered_by_status(client, submitted):
    client.post("/jobs", json=BODY)
    client.post(f"/jobs/{submitted}/cancel")
    listed = client.get("/jobs", params={"status": "cancelled"}).json()["data"]
    assert [job["id"] for job in listed] == [submitted]


def test_jobs_can_be_filtered_by_labels(client):
    odd = 'é "quoted" $.x[0] \\ %'
    labelled = [{"team": "a", "run": "1"}, {"team": "a", "run": "2"}, {"team": "b", odd: odd}, {}]
    made = [client.post("/jobs", json=BODY | {"metadata": labels}).json()["id"] for labels in labelled]

    def found(**labels):
        answer = client.get("/jobs", params={f"metadata[{key}]": value for key, value in labels.items()})
        return {made.index(job["id"]) for job in answer.json()["data"]}

    assert found(team="a") == {0, 1}
    assert found(team="a", run="2") == {1}
    assert found(team="b", run="2") == set()
    assert found(**{odd: odd}) == {2}
    assert found(run="a") == found(**{"x' OR '1'='1": "1"}) == found(team="%") == set()
    assert found() == {0, 1, 2, 3}
    both = client.get("/jobs?metadata[team]=a&metadata[team]=b&limit=5").json()
    assert both["data"] == []


def test_filtering_by_labels_supports_pagination(client):
    made = [client.post("/jobs", json=BODY | {"metadata": {"k": str(n % 2)}}).json()["id"] for n in range(4)]
    first = client.get("/jobs?metadata[k]=1&limit=1").json()
    assert (first["first_id"], first["has_more"]) == (made[3], True)
    second = client.get(f"/jobs?metadata[k]=1&limit=1&after={first['last_id']}").json()
    assert (second["first_id"], second["has_more"]) == (made[1], False)


@pytest.mark.parametrize(
    "query",
    [
        "metadata=x",
        "metadata[a=x",
        "metadata[]=x",
        f"metadata[{'k' * 65}]=x",
        f"metadata[k]={'v' * 513}",
        "metadata[k]=%00",
        "metadata[%00]=v",
        "&".join(f"metadata[{number}]=x" for number in range(17)),
    ],
)
def test_invalid_labels_are_refused(client, query):
    answer = client.get(f"/jobs?{query}")
    assert (answer.status_code, answer.json()["param"]) == (422, "metadata")


def test_an_unchanged_job_is_not_modified(client, submitted, worker):
    first = client.get(f"/jobs/{submitted}")
    again = client.get(f"/jobs/{submitted}", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    worker.claim(submitted)
    changed = client.get(f"/jobs/{submitted}", headers={"If-None-Match": first.headers["ETag"]})
    assert changed.json()["status"] == "running"
    assert changed.headers["ETag"] != first.headers["ETag"]


def test_a_job_that_has_changed_is_not_deleted(client, submitted, worker):
    first = client.get(f"/jobs/{submitted}").headers["ETag"]
    worker.fail(submitted, JobError(code="x", message="m"))
    assert client.get(f"/jobs/{submitted}", headers={"If-Match": first}).status_code == 412
    assert client.delete(f"/jobs/{submitted}", headers={"If-Match": first}).status_code == 412
    current = client.get(f"/jobs/{submitted}").headers["ETag"]
    assert client.delete(f"/jobs/{submitted}", headers={"If-Match": current}).status_code == 204


@pytest.mark.parametrize("path", ["/jobs", "/profiles"])
def test_ignore_patterns_without_a_match_are_refused(client, path):
    body = {name: value for name, value in BODY.items() if name != "ratio" or path == "/jobs"}
    answer = client.post(path, json=body | {"options": {"ignore": ["*.q_proj", "*.dwn_proj"]}})
    told = answer.json()
    assert (answer.status_code, told["code"], told["param"]) == (422, "unmatched_ignore", "options.ignore.1")
    assert "pattern 2 of 2 matches no layer of local/tiny; did you mean '*.down_proj'?" in told["detail"]
    assert client.get("/jobs").json()["data"] == []
    right = {"ignore": ["*.q_proj", "model.layers.1.*", "layers.0.mlp.down_proj", "*.[kv]_proj"]}
    assert client.post(path, json=body | {"options": right}).status_code == 202


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "after=1", "after=job_%00", "status=lost"])
def test_invalid_query_parameters_are_refused(client, query):
    assert client.get(f"/jobs?{query}").status_code == 422


def test_cancelling_a_queued_job_is_immediate_and_idempotent(client, submitted):
    for _ in range(2):
        answer = client.post(f"/jobs/{submitted}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert "Retry-After" not in client.get(f"/jobs/{submitted}").headers


def test_cancelling_a_running_job_requests_a_stop(client, submitted, worker):
    worker.claim(submitted)
    answer = client.post(f"/jobs/{submitted}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelling")
    assert "Retry-After" in answer.headers


def test_a_running_job_shows_its_progress(client, submitted, worker):
    lease = worker.claim(submitted)
    worker.do(outputs.report_progress, lease, stage="calibrating", progress=0.25)
    job = client.get(f"/jobs/{submitted}").json()
    assert (job["status"], job["stage"], job["progress"], job["attempt"]) == ("running", "calibrating", 0.25, 1)


def test_a_failed_job_has_its_error_and_is_final(client, submitted, worker):
    worker.fail(submitted, BROKEN)
    job = client.get(f"/jobs/{submitted}").json()
    assert job["status"] == "failed"
    assert job["error"] == {
        "code": "calibration_empty",
        "message": "too little text",
        "stage": "calibrating",
        "layer": None,
        "retryable": False,
    }
    answer = client.post(f"/jobs/{submitted}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_state_conflict")
    assert answer.headers["x-should-retry"] == "false"


def test_a_retry_is_a_new_job_and_leaves_the_old_one_unchanged(client, submitted, worker):
    worker.fail(submitted, BROKEN)
    before = client.get(f"/jobs/{submitted}").json()
    answers = [client.post(f"/jobs/{submitted}/retry") for _ in range(2)]
    retry = answers[0].json()
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[1].json()["id"] == retry["id"] != submitted
    assert (retry["status"], retry["retry_of"]) == ("queued", submitted)
    assert answers[0].headers["Location"] == f"/jobs/{retry['id']}"
    assert client.get(f"/jobs/{submitted}").json() == before


def test_a_queued_job_can_neither_be_retried_nor_deleted(client, submitted):
    assert client.post(f"/jobs/{submitted}/retry").status_code == 409
    assert client.delete(f"/jobs/{submitted}").status_code == 409


def test_deleting_a_job_removes_its_files(client, submitted, worker, context):
    worker.succeed(submitted, {"report.json": b"{}"})
    assert len(list((context.settings.data_dir / "artifacts").iterdir())) == 1
    assert client.delete(f"/jobs/{submitted}").status_code == 204
    assert client.get(f"/jobs/{submitted}").status_code == 404
    assert client.delete(f"/jobs/{submitted}").status_code == 404
    assert list((context.settings.data_dir / "artifacts").iterdir()) == []


def test_a_job_is_deleted_even_if_its_files_cannot_be_removed(client, submitted, worker, context, monkeypatch):
    def stuck(_store, _key):
        raise StorageError("the file is stuck")

    worker.succeed(submitted, {"report.json": b"{}"})
    monkeypatch.setattr(type(context.artifacts), "remove", stuck)
    assert client.delete(f"/jobs/{submitted}").status_code == 204
    assert client.get(f"/jobs/{submitted}").status_code == 404


def test_layers_show_their_profiles_and_then_their_choices(client, submitted, worker, factored):
    lease = worker.claim(submitted)
    worker.profile_layers(lease)
    layers = client.get(f"/jobs/{submitted}/layers").json()["data"]
    assert [(layer["name"], layer["chosen"]) for layer in layers] == [("b", None), ("a", None)]
    assert {candidate["kind"] for candidate in layers[0]["candidates"]} == {"dense", "factored"}
    worker.do(outputs.save_allocation, lease, [("b", factored), ("a", factored)])
    layers = client.get(f"/jobs/{submitted}/layers").json()["data"]
    assert layers[0]["chosen"] == json.loads(factored.model_dump_json())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("POST", "/cancel"),
        ("POST", "/retry"),
        ("DELETE", ""),
        ("GET", "/events"),
        ("GET", "/layers"),
        ("GET", "/report"),
        ("GET", "/artifacts"),
        ("GET", "/artifacts/x"),
        ("HEAD", "/artifacts/x"),
    ],
)
def test_an_unknown_job_is_not_found_at_any_endpoint(client, method, path):
    assert client.request(method, f"/jobs/{UNKNOWN}{path}").status_code == 404


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_id": "local/none"}, "model_not_found"),
        ({"model_id": "local/config.json"}, "model_not_found"),
        ({"calibration": {"dataset": "local/none.jsonl"}}, "unknown_dataset"),
        ({"calibration": {"dataset": "local/mine"}}, "unknown_dataset"),
    ],
)
def test_names_that_the_server_does_not_offer_are_refused(client, change, code):
    answer = client.post("/jobs", json=BODY | change)
    assert (answer.status_code, answer.json()["code"]) == (422, code)


def test_all_listed_models_and_datasets_can_be_submitted(client):
    models = [model["id"] for model in client.get("/models").json()["data"]]
    calibrations = [dataset["id"] for dataset in client.get("/calibrations").json()["data"]]
    assert models == ["local/tiny"]
    assert {"builtin", "wikitext2", "local/mine.jsonl"} <= set(calibrations)
    for dataset in ("builtin", "local/mine.jsonl"):
        answer = client.post("/jobs", json=BODY | {"model_id": models[0], "calibration": {"dataset": dataset}})
        assert answer.status_code == 202
