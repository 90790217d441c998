"""Requests to a hub on the loopback interface."""

import json
import socket
import time

import pytest
from huggingface_hub import utils

from rocket_core.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    HubUnavailableError,
    ModelNotFoundError,
)
from rocket_core.hub import repository as hub
from rocket_core.inspection.headers.weight_summary import summarize
from tests.reference.fake_hub import COMMIT, FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = safetensors_bytes(llama_tensors())
SHAPES = {(32, 32): 4, (16, 32): 4, (80, 32): 4, (32, 80): 2}


@pytest.fixture
def fake(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        fake.repositories["org/model"] = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        yield fake
        utils.close_session()


def find(revision=None, *, token=None, seconds=5.0):
    return hub.find_repository("org/model", revision, token=token, seconds=seconds)


def test_a_repository_is_read_without_its_weights(fake):
    repository = find("v1", token="x")  # noqa: S106 - a token of the fake hub
    assert repository.commit == COMMIT
    assert repository.read_config() == CONFIG
    weights = repository.read_weights()
    assert dict(weights.block_shapes) == SHAPES
    assert set(weights.dtype_bytes) == {"F32"}
    assert {token for _, token, _ in fake.asked} == {"Bearer x"}
    paths = [path for path, _, _ in fake.asked]
    assert paths == [
        "/api/models/org/model/revision/v1",
        f"/org/model/resolve/{COMMIT}/config.json",
        f"/org/model/resolve/{COMMIT}/model.safetensors",
    ]


def test_a_long_header_takes_only_a_second_request(fake):
    tensors = llama_tensors(blocks=200)
    fake.repositories["org/model"]["model.safetensors"] = safetensors_bytes(
        {key: (dtype, (2, 2) if len(shape) == 2 else shape) for key, (dtype, shape) in tensors.items()}
    )
    weights = find().read_weights()
    assert dict(weights.block_shapes) == {(2, 2): 1400}
    assert len([path for path, _, part in fake.asked if path.endswith("model.safetensors") and part]) == 2


def test_without_range_support_headers_are_still_read(fake):
    fake.ranges = False
    assert dict(find().read_weights().block_shapes) == SHAPES


def test_a_file_without_content_length_can_be_read(fake):
    fake.lengths = False
    repository = find()
    assert repository.read_config() == CONFIG
    assert dict(repository.read_weights().block_shapes) == SHAPES
    # Without a size to compare with, it is left to the worker.
    fake.ranges = False
    assert find().read_weights() is None


def test_all_files_of_the_index_are_read(fake):
    tensors = llama_tensors()
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    files = {f"m-{part}.safetensors": safetensors_bytes(half) for part, half in enumerate(halves)}
    index = {"weight_map": {key: f"m-{part}.safetensors" for part, half in enumerate(halves) for key in half}}
    fake.repositories["org/model"] = {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "consolidated.safetensors": b"",
        "original/model.safetensors": b"",
        **files,
    }
    assert dict(find().read_weights().block_shapes) == SHAPES
    del fake.repositories["org/model"]["m-1.safetensors"]
    with pytest.raises(CorruptCheckpointError, match=r"lacks 1 of 2.*m-1"):
        find().read_weights()


def test_too_many_files_are_left_to_the_worker(fake, monkeypatch):
    monkeypatch.setattr(hub, "_MAX_FILES", 0)
    assert find().read_weights() is None


def test_too_many_tensors_in_all_files_are_left_to_the_worker(fake, monkeypatch):
    files = {f"model-{part}.safetensors": safetensors_bytes(llama_tensors(blocks=1)) for part in range(3)}
    fake.repositories["org/model"] = {"config.json": CONFIG, **files}
    monkeypatch.setattr(hub, "_MAX_TENSORS", 3 * len(llama_tensors(blocks=1)))
    assert find().read_weights() is not None
    monkeypatch.setattr(hub, "_MAX_TENSORS", 3 * len(llama_tensors(blocks=1)) - 1)
    assert find().read_weights() is None


def test_too_long_a_header_is_left_to_the_worker(fake, monkeypatch):
    monkeypatch.setattr(hub, "_FIRST_BYTES", 100)
    monkeypatch.setattr(hub, "_MAX_HEADER_BYTES", 500)
    assert find().read_weights() is None


@pytest.mark.parametrize("content", [WEIGHTS[:-1], WEIGHTS[:50], b"", b"PK\x03\x04" + bytes(100)])
def test_damaged_weights_are_refused(fake, content):
    fake.repositories["org/model"]["model.safetensors"] = content
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors of the model repository"):
        find().read_weights()


def test_a_repository_of_pickles_is_refused(fake):
    fake.repositories["org/model"] = {"config.json": CONFIG, "pytorch_model.bin": b""}
    with pytest.raises(CheckpointFormatError, match="pickle"):
        find().read_weights()


def test_a_repository_without_config_is_refused(fake):
    fake.repositories["org/model"] = {"model.safetensors": WEIGHTS}
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        find().read_config()


def test_a_missing_repository_or_revision_is_not_found(fake):
    with pytest.raises(ModelNotFoundError, match="HF_TOKEN"):
        hub.find_repository("org/other", token=None, seconds=5.0)
    with pytest.raises(ModelNotFoundError, match="revision"):
        find("v9")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, None, ModelNotFoundError),
        (403, None, ModelNotFoundError),
        (403, "GatedRepo", ModelNotFoundError),
        (400, None, ModelNotFoundError),
        (429, None, HubUnavailableError),
        (500, None, HubUnavailableError),
        (502, None, HubUnavailableError),
        (503, None, HubUnavailableError),
    ],
)
@pytest.mark.parametrize("question", ["/api/models", "/org/model/resolve"])
def test_refusals_differ_from_failures_and_are_not_retried(fake, status, code, error, question):
    fake.refusals = [(question, status, code)]
    with pytest.raises(error):
        find().read_config()
    assert len([path for path, _, _ in fake.asked if path.startswith(question)]) == 1


def test_gated_weights_say_what_to_do(fake):
    fake.refusals = [("/org/model/resolve", 403, "GatedRepo")]
    with pytest.raises(ModelNotFoundError, match="accept its terms"):
        find().read_config()


def test_a_response_not_from_the_hub_is_unavailable(fake, monkeypatch):
    fake.refusals = [("/api/models", 200, None)]
    with pytest.raises(HubUnavailableError, match="not the Hub"):
        find()


def test_an_unreachable_hub_is_unavailable(fake, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        FakeHub.replace(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(HubUnavailableError, match="try again later"):
        find()


@pytest.mark.parametrize("question", ["/api/models", "/org/model/resolve"])
def test_a_silent_hub_is_unavailable_in_time(fake, question):
    fake.silent = [question]
    began = time.monotonic()
    with pytest.raises(HubUnavailableError):
        find(seconds=0.5).read_config()
    assert time.monotonic() - began < 2


def test_a_slow_hub_is_unavailable_in_time(fake):
    fake.repositories["org/model"]["config.json"] += b" " * 100
    fake.trickle = ["/org/model/resolve"]
    # Two seconds are longer than a busy machine keeps this process, which is the Hub as well, from sending a byte.
    began = time.monotonic()
    with pytest.raises(HubUnavailableError, match="too slowly"):
        find(seconds=2).read_config()
    assert time.monotonic() - began < 6


def test_a_slow_listing_is_unavailable_in_time(fake):
    fake.repositories["org/model"] |= {f"file-{number}": b"" for number in range(100)}
    fake.trickle = ["/api/models"]
    with pytest.raises(HubUnavailableError, match="too slowly"):
        find(seconds=2)


@pytest.mark.parametrize("how", ["silent", "trickle"])
def test_slow_headers_are_left_to_the_worker(fake, how):
    setattr(fake, how, [f"/org/model/resolve/{COMMIT}/model"])
    repository = find(seconds=0.7)
    assert repository.read_config() == CONFIG
    began = time.monotonic()
    assert repository.read_weights() is None
    assert time.monotonic() - began < 2


def test_failing_headers_are_unavailable(fake):
    fake.refusals = [(f"/org/model/resolve/{COMMIT}/model", 500, None)]
    with pytest.raises(HubUnavailableError, match="500"):
        find().read_weights()


def test_the_summary_equals_that_of_local_headers():
    from rocket_core.inspection.files.safetensors_headers import header_length, parse_header

    length = header_length(WEIGHTS[:8], len(WEIGHTS), "x")
    summary = summarize(parse_header(WEIGHTS[8 : 8 + length], len(WEIGHTS), "x"))
    assert dict(summary.block_shapes) == SHAPES
