import pytest

from app.shared.lifecycle import Status
from app.shared.repositories import evaluations, outputs, works
from rocket_core.report.answers import AnswerToken, ComparedAnswer
from rocket_core.report.quality import Difference, EvaluationReport, ModelQuality
from tests.app.api.conftest import BODY

pytestmark = pytest.mark.databases("sqlite", soak=("postgres",))

REPORT = EvaluationReport(
    export="rocket",
    dataset="builtin",
    windows=2,
    sequence_length=16,
    stride=16,
    tokens=30,
    text_sha256="0" * 64,
    before=ModelQuality(negative_log_likelihood=1.0, perplexity=2.7),
    after=ModelQuality(negative_log_likelihood=2.0, perplexity=7.4),
    difference=Difference(kl_divergence=0.5, top1_agreement=0.9),
    answers=(
        ComparedAnswer(
            prompt="Hi",
            is_chat=False,
            before=(AnswerToken(text=" you", before=0.5, after=0.4, kl_divergence=0.2),),
            after=(" me",),
            first_difference=0,
        ),
    ),
)


@pytest.fixture
def done(submitted, worker):
    worker.succeed(submitted, {"rocket/model.safetensors": b"1"})
    return f"/jobs/{submitted}"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompts": ["Once upon"]}, "local/tiny predicts no tokens and answers no prompts"),
        ({"tasks": ["arc_easy"]}, "local/tiny predicts no tokens, which zero-shot tasks score; leave tasks out"),
    ],
)
def test_what_no_encoder_can_answer_is_refused_at_once(client, submitted, worker, asked, said):
    config = b'{"architectures": ["BertForMaskedLM"]}'
    worker.succeed(submitted, {"rocket/model.safetensors": b"1", "rocket/config.json": config})
    answers = [client.post(f"/jobs/{submitted}/evaluations", json=body) for body in ({}, asked)]
    assert [answer.status_code for answer in answers] == [202, 422]
    assert said in answers[1].json()["detail"]


def test_a_finished_job_can_be_evaluated(client, worker, done):
    asked = {"prompts": ["Hi"], "samples": 2}
    answer = client.post(f"{done}/evaluations", json=asked)
    assert answer.status_code == 202
    job = answer.json()
    assert (job["kind"], job["status"], job["source_job_id"]) == ("evaluation", "queued", done.removeprefix("/jobs/"))
    assert answer.headers["Location"] == f"/jobs/{job['id']}"
    assert asked.items() <= job["evaluate"].items()
    assert (job["model_id"], job["ratio"], job["metadata"]) == (BODY["model_id"], BODY["ratio"], {})
    assert client.get(f"{done}/evaluations").json()["data"] == [{"job": job, "report": None}]

    lease = worker.claim(job["id"])
    assert worker.do(works.save_report, lease, REPORT)
    assert not worker.do(works.save_report, lease, REPORT)
    assert worker.do(outputs.succeed_without_files, lease) == Status.SUCCEEDED
    [found] = client.get(f"{done}/evaluations").json()["data"]
    assert found["job"]["status"] == "succeeded"
    assert EvaluationReport.model_validate(found["report"]) == REPORT
    assert client.get(f"/jobs/{job['id']}/report").json()["detail"].startswith("evaluation jobs have no report")
    assert [one["id"] for one in client.get("/jobs").json()["data"]] == [job["id"], done.removeprefix("/jobs/")]


def test_only_the_newest_evaluations_have_answers(client, worker, done):
    for samples in range(1, 6):
        job = client.post(f"{done}/evaluations", json={"samples": samples}).json()
        if samples < 5:
            assert worker.do(works.save_report, worker.claim(job["id"]), REPORT)
    data = client.get(f"{done}/evaluations").json()["data"]
    reports = [None if one["report"] is None else EvaluationReport.model_validate(one["report"]) for one in data]
    assert reports == [None, REPORT, REPORT, REPORT, REPORT.model_copy(update={"answers": ()})]


def test_lists_read_no_answers(client, worker, context, done):
    job = client.post(f"{done}/evaluations", json={}).json()
    assert worker.do(works.save_report, worker.claim(job["id"]), REPORT)
    without = REPORT.model_copy(update={"answers": ()})
    source, owner = done.removeprefix("/jobs/"), "local"
    with context.database.snapshot() as session:
        assert evaluations.newest_evaluations(session, [source]) == {source: without}
        measured = evaluations.list_measured(session, owner, BODY["model_id"], limit=9)
    # The job itself has none.
    assert [report for _, report in measured] == [without]


def test_a_replayed_evaluation_is_the_same_job(client, done):
    ids = [client.post(f"{done}/evaluations", json={}, headers={"Idempotency-Key": "k"}).json()["id"] for _ in range(2)]
    assert ids[0] == ids[1]
    other = client.post(f"{done}/evaluations", json={"samples": 3}, headers={"Idempotency-Key": "k"})
    assert other.json()["code"] == "idempotency_key_reused"


def test_an_evaluation_outlives_the_job_that_it_measured(client, worker, done):
    job = client.post(f"{done}/evaluations", json={}).json()
    assert client.delete(done).status_code == 409, "it is needed"
    client.post(f"/jobs/{job['id']}/cancel")
    assert client.delete(done).status_code == 204
    left = client.get(f"/jobs/{job['id']}").json()
    assert (left["kind"], left["source_job_id"], left["status"]) == ("evaluation", None, "cancelled")


def test_a_failed_evaluation_can_be_retried(client, worker, done):
    job = client.post(f"{done}/evaluations", json={}).json()
    client.post(f"/jobs/{job['id']}/cancel")
    again = client.post(f"/jobs/{job['id']}/retry").json()
    assert (again["kind"], again["source_job_id"]) == ("evaluation", done.removeprefix("/jobs/"))
    assert [found["job"]["id"] for found in client.get(f"{done}/evaluations").json()["data"]] == [
        again["id"],
        job["id"],
    ]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"dataset": "local/none.txt"}, 422, "unknown_dataset"),
        ({"dataset": "upload/" + "0" * 32}, 404, "upload_not_found"),
        ({"tasks": ["local/none.jsonl"]}, 422, "unknown_dataset"),
        ({"prompts": ["a"] * 17}, 422, "invalid_request"),
        ({"answer_tokens": 513}, 422, "invalid_request"),
        ({"prompts": ["\x00"]}, 422, "invalid_request"),
        ({"ratio": 0.3}, 422, "invalid_request"),
    ],
)
def test_what_no_worker_could_evaluate_is_refused(client, done, body, status, code):
    answer = client.post(f"{done}/evaluations", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_only_a_compression_with_a_result_can_be_evaluated(client, worker, submitted, done):
    profiled = client.post("/profiles", json={"model_id": "local/tiny"}).json()["id"]
    evaluating = client.post(f"{done}/evaluations", json={}).json()["id"]
    for job_id in (profiled, evaluating):
        answer = client.post(f"/jobs/{job_id}/evaluations", json={})
        assert (answer.status_code, answer.json()["code"]) == (409, "job_state_conflict")
        assert "only the result of a succeeded job" in answer.json()["detail"]


def test_a_quality_measured_later_replaces_the_prediction(client, worker, done):
    def shown():
        listed = client.get("/jobs").json()["data"][-1]
        found = client.get(done)
        assert listed == found.json()
        return found.json()["result"]["quality"], found.json()["result"]["quality_is_measured"], found.headers["ETag"]

    assert shown()[:2] == ("10 → 10.2", False)
    before = client.get(done).json()["result"]
    tags = {shown()[2]}
    for perplexity in (7.4, 6.8):
        after = ModelQuality(negative_log_likelihood=2.0, perplexity=perplexity)
        lease = worker.claim(client.post(f"{done}/evaluations", json={}).json()["id"])
        worker.do(works.save_report, lease, REPORT.model_copy(update={"after": after}))
        worker.do(outputs.succeed_without_files, lease)
        assert shown()[:2] == (f"2.7 → {perplexity}", True)
        tags.add(shown()[2])
    assert len(tags) == 3
    assert client.get(done).json()["result"] == before | {"quality": "2.7 → 6.8", "quality_is_measured": True}


def test_a_measured_quality_is_kept(client, worker, submitted, result):
    worker.result = result.model_copy(update={"quality": "10 → 10.3", "quality_is_measured": True})
    worker.succeed(submitted, {"rocket/model.safetensors": b"1"})
    lease = worker.claim(client.post(f"/jobs/{submitted}/evaluations", json={}).json()["id"])
    worker.do(works.save_report, lease, REPORT)
    worker.do(outputs.succeed_without_files, lease)
    assert client.get(f"/jobs/{submitted}").json()["result"]["quality"] == "10 → 10.3"
