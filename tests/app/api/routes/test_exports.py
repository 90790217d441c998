"""Jobs that write the result of another job in another format: what is accepted, and what it becomes."""

import json

import pytest

from tests.app.api.conftest import BODY
from tests.reference.reports import report_of_layers

pytestmark = pytest.mark.databases("sqlite", "postgres")

UNKNOWN = "job_" + "0" * 26
LLAMA = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


def files(settings=LLAMA):
    return {"rocket/model.safetensors": b"weights", "rocket/config.json": json.dumps(settings).encode()}


def coded(report, **changes):
    """Return a report with layers made of codes of 4 bits in groups of 64."""
    made = {"kind": "quantized", "bits": 4, "group_size": 64, "scale_bits": 16, "rank": None, "nnz": None, "d_in": 128}
    return report.model_copy(
        update={"layers": tuple(layer.model_copy(update=made | changes) for layer in report.layers)}
    )


@pytest.fixture
def finish(client, worker):
    """Return a job that has succeeded with a report and settings of the model."""

    def finish(report=None, settings=LLAMA, **body):
        worker.report = report or report_of_layers()
        job_id = client.post("/jobs", json=BODY | body).json()["id"]
        worker.succeed(job_id, files(settings))
        return job_id

    return finish


def export(client, job_id, to="dense", **body):
    return client.post(f"/jobs/{job_id}/exports", json={"to": to} | body)


def test_a_result_is_written_in_another_format(client, finish):
    finished = finish()
    answer = export(client, finished, metadata={"why": "a phone"})
    job, before = answer.json(), client.get(f"/jobs/{finished}").json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["kind"], job["source_job_id"], job["export_to"]) == ("export", finished, "dense")
    assert (before["kind"], before["export_to"]) == ("compression", None)
    assert (job["options"], job["metadata"]) == (before["options"], {"why": "a phone"})
    assert [each["id"] for each in client.get(f"/jobs/{finished}/exports").json()["data"]] == [job["id"]]
    assert client.get(f"/jobs/{finished}/evaluations").json()["data"] == []


def test_one_key_makes_one_export(client, finish):
    job_id, headers = finish(coded(report_of_layers())), {"Idempotency-Key": "k"}
    answers = [
        client.post(f"/jobs/{job_id}/exports", json={"to": to}, headers=headers) for to in ("dense", "dense", "gguf")
    ]
    assert [answer.status_code for answer in answers] == [202, 200, 422]
    assert answers[0].json()["id"] == answers[1].json()["id"]


@pytest.mark.parametrize("to", ["rocket", "onnx", None])
def test_invalid_formats_name_the_member(client, finish, to):
    answer = export(client, finish(), to=to)
    assert (answer.status_code, answer.json()["param"]) == (422, "to")


@pytest.mark.parametrize(
    ("changes", "config", "refused"),
    [
        ({}, LLAMA, {}),
        ({"group_size": 24}, LLAMA, {"gguf": "groups of 24", "compressed-tensors": "groups of 24"}),
        ({"bits": 3}, LLAMA, {"compressed-tensors": "has codes of 3 bits"}),
        ({"kind": "entropy_coded", "bits": None, "group_size": None}, LLAMA, {"compressed-tensors": "entropy coded"}),
        ({"kind": "sparse"}, LLAMA, {"gguf": "is made of coefficients", "compressed-tensors": "is made of coeff"}),
        ({"kind": "factored"}, LLAMA, {"gguf": "product of two", "compressed-tensors": "product of two"}),
        ({}, {"architectures": ["BertModel"]}, {"gguf": "is a BertModel", "compressed-tensors": "is a BertModel"}),
        ({}, LLAMA | {"dtype": "float32"}, {"compressed-tensors": "runs models in 16 bits"}),
    ],
)
def test_formats_that_cannot_hold_it_are_refused_at_once(client, finish, changes, config, refused):
    job_id = finish(coded(report_of_layers(), **changes), config)
    answers = {to: export(client, job_id, to) for to in ("dense", "gguf", "compressed-tensors")}
    assert {to for to, answer in answers.items() if answer.status_code != 202} == refused.keys()
    for to, reason in refused.items():
        assert answers[to].status_code == 422
        assert reason in answers[to].json()["detail"]


def test_layers_that_vllm_fuses_must_be_stored_alike(client, finish):
    report = coded(report_of_layers())
    unlike = [
        report.layers[0].model_copy(update={"name": f"a.{name}_proj", "bits": bits})
        for name, bits in (("q", 4), ("k", 8))
    ]
    answer = export(client, finish(report.model_copy(update={"layers": tuple(unlike)})), "compressed-tensors")
    assert answer.status_code == 422
    assert "stored differently, and vLLM fuses them" in answer.json()["detail"]


def test_only_a_finished_result_can_be_exported(client, submitted, finish):
    assert export(client, submitted).json()["code"] == "job_state_conflict"
    assert export(client, UNKNOWN).status_code == 404
    dense_only = finish(options={"export": ["dense"]})
    answer = export(client, dense_only, "gguf")
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_export")


def test_what_was_exported_already_is_refused(client, finish):
    report = report_of_layers()
    made = report.exports[0].model_copy(update={"kind": "dense"})
    answer = export(client, finish(report.model_copy(update={"exports": (made,)})))
    assert answer.json()["code"] == "job_state_conflict"


def test_an_export_has_nothing_more_to_export(client, finish, worker):
    job_id = export(client, finish()).json()["id"]
    worker.succeed(job_id, {"dense/model.safetensors": b"weights"})
    for path, body in (("exports", {"to": "gguf"}), ("evaluations", {}), ("healings", {"tokens": 5})):
        answer = client.post(f"/jobs/{job_id}/{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "job_state_conflict")
        assert "name the job that made the result" in answer.json()["detail"]


def test_the_exported_job_cannot_be_deleted_meanwhile(client, finish):
    finished = finish()
    made = export(client, finished).json()["id"]
    assert client.delete(f"/jobs/{finished}").status_code == 409
    client.post(f"/jobs/{made}/cancel")
    assert client.delete(f"/jobs/{finished}").status_code == 204


def test_an_export_outlives_the_model(client, finish, settings):
    finished = finish()
    (settings.models_folder / "tiny").rename(settings.models_folder / "gone")
    assert export(client, finished).status_code == 202
