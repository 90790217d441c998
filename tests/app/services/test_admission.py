"""Refusals before a job exists, through the API."""

import json
import shutil
import threading
import time

import pytest
from huggingface_hub import utils
from pydantic import SecretStr

from app.main import create_app
from app.services import admission
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client
from tests.reference.coded_models import save_coded
from tests.reference.fake_hub import FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes, save_llama

LLAMA = {"model_type": "llama"}
QUANTIZED = LLAMA | {"quantization_config": {"quant_method": "gptq"}}
HUB_BODY = BODY | {"model_id": "org/model"}


@pytest.fixture
def odd(settings):
    return save_llama(settings.models_folder / "odd")


@pytest.fixture
def hub(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        weights = safetensors_bytes(llama_tensors())
        fake.repositories["org/model"] = {
            "config.json": json.dumps(LLAMA).encode(),
            "model.safetensors": weights,
            "tokenizer.json": b"{}",
        }
        yield fake
        utils.close_session()


def refused(client, body, status, code, *, path="/jobs"):
    answer = client.post(path, json=body)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), problem
    assert client.get("/jobs").json()["data"] == []
    return answer


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"config.json": json.dumps(QUANTIZED)}, "already_quantized"),
        ({"config.json": '{"model_type": "clip"}'}, "unsupported_architecture"),
        ({"config.json": '{"model_type": "vit", "patch_size": 8}'}, "unknown_dataset"),
        ({"config.json": '{"model_type": "whisper", "num_mel_bins": 80}'}, "unknown_dataset"),
        ({"config.json": '{"auto_map": {"AutoConfig": "a.B"}}'}, "unsupported_architecture"),
        ({"config.json": '{"auto_map": {"AutoConfig": "a.B"}, "model_type": "qwen"}'}, "unsupported_architecture"),
        ({"config.json": "{"}, "unsupported_architecture"),
        ({"config.json": "[]"}, "unsupported_architecture"),
        ({"config.json": " " * (2**22 + 1)}, "unsupported_architecture"),
        ({"model.safetensors": None}, "checkpoint_format"),
        ({"model.safetensors": None, "pytorch_model.bin": ""}, "checkpoint_format"),
        ({"model.safetensors": ""}, "corrupt_checkpoint"),
        ({"model.safetensors": "not a checkpoint"}, "corrupt_checkpoint"),
        ({"model.safetensors": None, "model.safetensors.index.json": "{}"}, "corrupt_checkpoint"),
    ],
)
def test_incompressible_local_models_are_refused(client, settings, odd, change, code):
    for name, content in change.items():
        (odd / name).unlink(missing_ok=True)
        if content is not None:
            (odd / name).write_text(content)
    answer = refused(client, BODY | {"model_id": "local/odd"}, 422, code)
    # Clients must not learn the paths of this machine.
    assert str(settings.data_dir) not in answer.text
    assert "local/odd" in answer.json()["detail"]


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "F4", "I32"])
def test_quantized_weights_are_refused(client, settings, odd, dtype):
    save_llama(odd, dtype=dtype)
    refused(client, BODY | {"model_id": "local/odd"}, 422, "already_quantized")


@pytest.mark.parametrize("path", ["/jobs", "/estimates"])
def test_coded_layers_among_plain_weights_are_refused(client, settings, path):
    save_coded("FP8 with scales of blocks", settings.models_folder / "coded")
    answer = refused(client, BODY | {"model_id": "local/coded"}, 422, "already_quantized", path=path)
    assert "local/coded stores weights as FP8 with scales of blocks" in answer.json()["detail"]
    assert "down_proj.weight_scale_inv" in answer.json()["detail"]


def test_coded_layers_on_the_hub_are_refused_by_header(client, hub, tmp_path):
    coded = save_coded("packed by GPTQ", tmp_path / "coded")
    for name in ("config.json", "model.safetensors"):
        hub.repositories["org/model"][name] = (coded / name).read_bytes()
    answer = refused(client, HUB_BODY, 422, "already_quantized")
    assert "integers packed by GPTQ" in answer.json()["detail"]


def test_a_model_without_blocks_is_refused(client, odd):
    save_llama(odd, blocks=0)
    refused(client, BODY | {"model_id": "local/odd"}, 422, "unsupported_architecture")


def test_an_unreadable_file_is_refused(client, odd):
    (odd / "model.safetensors").unlink()
    (odd / "model.safetensors.index.json").symlink_to("/nowhere")
    refused(client, BODY | {"model_id": "local/odd"}, 422, "unsafe_file")
    (odd / "model.safetensors.index.json").unlink()
    (odd / "a.safetensors").mkdir()
    refused(client, BODY | {"model_id": "local/odd"}, 422, "checkpoint_format")


def test_an_unreachable_ratio_is_refused_with_a_reachable_one(client):
    problem = refused(client, BODY | {"ratio": 0.95}, 422, "infeasible_budget").json()
    assert 0.65 < problem["nearest_ratio"] < 0.75
    assert client.post("/jobs", json=BODY | {"ratio": problem["nearest_ratio"]}).status_code == 202


@pytest.mark.parametrize(("options", "smallest"), [({"engine": "llama.cpp"}, "1.486MB"), ({}, "427.9kB")], ids=str)
def test_the_smallest_size_is_named_when_a_job_is_submitted(client, settings, options, smallest):
    shutil.copytree("examples/tiny-llama", settings.models_folder / "tiny-llama")
    body = {"model_id": "local/tiny-llama", "options": options}
    size = round(float(smallest[:-2]) * {"kB": 1e3, "MB": 1e6}[smallest[-2:]])
    for path in ("/jobs", "/estimates"):
        answer = refused(client, body | {"target_bytes": round(0.9 * size)}, 422, "infeasible_budget", path=path)
        assert f"at least {smallest}; ask for that or more" in answer.json()["detail"]
    assert client.post("/estimates", json=body | {"target_bytes": size}).status_code == 200


def test_hub_requests_use_the_token_of_the_settings(hub, settings, monkeypatch):
    tokened = settings.model_copy(update={"hf_token": SecretStr("of-the-operator")})
    with local_client(create_app(tokened)) as client:
        answer = client.post("/jobs", json=HUB_BODY | {"revision": "v1"})
    assert answer.status_code == 202
    assert hub.asked[0][0] == "/api/models/org/model/revision/v1"
    assert {token for _, token, _ in hub.asked} == {"Bearer of-the-operator"}


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"config.json": json.dumps(QUANTIZED).encode()}, "already_quantized"),
        ({"config.json": b'{"model_type": "clip"}'}, "unsupported_architecture"),
        ({"config.json": b"<html>"}, "unsupported_architecture"),
        ({"config.json": None}, "model_not_found"),
        ({"model.safetensors": None}, "checkpoint_format"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, "checkpoint_format"),
        ({"model.safetensors": b"damaged"}, "corrupt_checkpoint"),
        ({"model.safetensors": safetensors_bytes(llama_tensors(dtype="I8"))}, "already_quantized"),
        ({"model.safetensors": safetensors_bytes(llama_tensors(blocks=0))}, "unsupported_architecture"),
    ],
)
def test_incompressible_hub_models_are_refused(client, hub, files, code):
    changed = hub.repositories["org/model"] | files
    hub.repositories["org/model"] = {name: content for name, content in changed.items() if content is not None}
    refused(client, HUB_BODY, 422, code)


def test_an_unreachable_ratio_of_a_hub_model_is_refused(client, hub):
    assert "nearest_ratio" in refused(client, HUB_BODY | {"ratio": 0.95}, 422, "infeasible_budget").json()


@pytest.mark.parametrize(
    ("path", "status", "hub_code", "answer", "code"),
    [
        ("/api/models", 401, None, 422, "model_not_found"),
        ("/api/models", 404, "RepoNotFound", 422, "model_not_found"),
        ("/api/models", 404, "RevisionNotFound", 422, "model_not_found"),
        ("/org/model/resolve", 403, "GatedRepo", 422, "model_not_found"),
        ("/api/models", 500, None, 503, "hub_unavailable"),
        ("/api/models", 429, None, 503, "hub_unavailable"),
        ("/org/model/resolve", 502, None, 503, "hub_unavailable"),
    ],
)
def test_refusals_of_the_hub_differ_from_its_failures(client, hub, path, status, hub_code, answer, code):
    hub.refusals = [(path, status, hub_code)]
    told = refused(client, HUB_BODY, answer, code)
    assert ("Retry-After" in told.headers) == (answer == 503)
    # The name is the client's own, and the Hub's message is only logged.
    assert "org/model" not in told.text


def test_an_unreachable_or_silent_hub_is_unavailable(client, hub, monkeypatch):
    monkeypatch.setattr(admission, "_HUB_SECONDS", 0.3)
    hub.silent = ["/"]
    began = time.monotonic()
    refused(client, HUB_BODY, 503, "hub_unavailable")
    assert time.monotonic() - began < 3
    hub.__exit__()
    assert "Retry-After" in refused(client, HUB_BODY, 503, "hub_unavailable").headers


@pytest.mark.parametrize("path", ["/jobs", "/estimates"])
def test_a_hub_with_an_unknown_host_is_unavailable(client, monkeypatch, path):
    FakeHub.replace(monkeypatch, "http://hub.invalid")
    answer = client.post(path, json=HUB_BODY)
    assert (answer.status_code, answer.json()["code"]) == (503, "hub_unavailable")


def test_a_window_beyond_the_models_context_is_refused(client, odd):
    (odd / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 64}))
    body = BODY | {"model_id": "local/odd", "calibration": {"sequence_length": 65}}
    refused(client, body, 422, "invalid_config")
    assert client.post("/jobs", json=body | {"calibration": {"sequence_length": 64}}).status_code == 202


def test_requests_waiting_for_the_hub_leave_threads_to_others(client, hub, monkeypatch):
    monkeypatch.setattr(admission, "_HUB_SECONDS", 2.0)
    hub.silent = ["/"]
    statuses = []
    waiting = [
        threading.Thread(target=lambda: statuses.append(client.post("/jobs", json=HUB_BODY).status_code))
        for _ in range(45)
    ]
    for thread in waiting:
        thread.start()
    began = time.monotonic()
    assert client.post("/jobs", json=BODY).status_code == 202
    assert time.monotonic() - began < 1.9
    for thread in waiting:
        thread.join()
    assert statuses == [503] * 45
    # All places are free again.
    hub.silent = []
    assert client.post("/jobs", json=HUB_BODY).status_code == 202


def test_slow_headers_are_checked_by_the_job_instead(client, hub, monkeypatch):
    monkeypatch.setattr(admission, "_HUB_SECONDS", 0.8)
    hub.trickle = ["/org/model/resolve/c0ffeec0ffeec0ffeec0ffeec0ffeec0ffeec0ff/model.safetensors"]
    assert client.post("/jobs", json=HUB_BODY).status_code == 202
