"""Hostile headers, config.json and patterns in real requests: 422 with a code, in bounded work, never 500."""

import json
import time

import pytest
from huggingface_hub import utils

from tests.app.api.conftest import BODY
from tests.reference.fake_hub import FakeHub
from tests.reference.hostile_files import CONFIGS, HEADERS, HUGE, LLAMA, ignore_patterns, many_dimensions
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes, save_llama

PATHS = ("/estimates", "/jobs")
CODES = {"already_quantized", "checkpoint_format", "corrupt_checkpoint", "unsupported_architecture"}
LOCAL = BODY | {"model_id": "local/odd"}
# The largest header that is read from the Hub.
DIMENSIONS = 190_000


@pytest.fixture
def settings(settings):
    # The default limit, so that everything arrives.
    limits = {"rate_limit": "100000/minute", "submit_rate_limit": "100000/minute", "max_body_bytes": 2**20}
    return settings.model_copy(update=limits)


@pytest.fixture
def odd(settings):
    return save_llama(settings.models_folder / "odd", config=LLAMA)


@pytest.fixture
def hub(monkeypatch):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        fake.repositories["org/model"] = {
            "config.json": json.dumps(LLAMA).encode(),
            "model.safetensors": safetensors_bytes(llama_tensors()),
        }
        yield fake
        utils.close_session()


def refusals(client, body):
    """Return the code with which both endpoints answer."""
    answers = [client.post(path, json=body) for path in PATHS]
    assert {answer.status_code for answer in answers} == {422}, [answer.text for answer in answers]
    assert all(len(answer.text) < 1500 for answer in answers)
    (code,) = {answer.json()["code"] for answer in answers}
    return code


def test_the_unmodified_model_is_accepted(client, odd):
    assert client.post("/estimates", json=LOCAL).status_code == 200
    assert client.post("/jobs", json=LOCAL).status_code == 202


# A quarter of a million tensors are for the library's own tests.
@pytest.mark.parametrize("name", sorted({*HEADERS} - {"too_many_tensors"}))
def test_a_hostile_header_is_refused(client, odd, name):
    (odd / "model.safetensors").write_bytes(HEADERS[name]())
    assert refusals(client, LOCAL) in CODES


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused(client, odd, name):
    (odd / "config.json").write_bytes(CONFIGS[name]())
    assert refusals(client, LOCAL) in CODES


def test_a_billion_layers_are_refused_by_field_name(client, hub):
    hub.repositories["org/model"]["config.json"] = json.dumps(LLAMA | {"num_hidden_layers": HUGE}).encode()
    answer = client.post("/estimates", json=BODY | {"model_id": "org/model"})
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_architecture")
    assert "num_hidden_layers" in answer.json()["detail"]


def test_an_adapter_in_the_repository_is_refused(client, hub):
    hub.repositories["org/model"]["adapter_config.json"] = b"{}"
    assert refusals(client, BODY | {"model_id": "org/model"}) == "checkpoint_format"


def test_parsing_a_hub_header_takes_linear_time(client, hub):
    raw = many_dimensions(DIMENSIONS)
    assert 3_500_000 < len(raw) < 2**22
    hub.repositories["org/model"]["model.safetensors"] = raw
    started = time.process_time()
    assert refusals(client, BODY | {"model_id": "org/model"}) == "corrupt_checkpoint"
    # It took 58 seconds for each of the two.
    assert time.process_time() - started < 8


@pytest.mark.parametrize("name", ignore_patterns())
def test_expensive_ignore_patterns_are_refused_quickly(client, name):
    started = time.process_time()
    code = refusals(client, BODY | {"options": {"ignore": ignore_patterns()[name]}})
    assert code == ("invalid_request" if name in {"long", "many"} else "unmatched_ignore")
    assert time.process_time() - started < 8


def test_too_many_ignore_patterns_are_refused_with_the_limit(client):
    for patterns, param in ((["*"] * 257, "options.ignore"), (["*", "*" * 257], "options.ignore.1")):
        problem = client.post("/jobs", json=BODY | {"options": {"ignore": patterns}}).json()
        assert problem["param"] == param
        assert "256" in problem["detail"]


def test_numbers_with_too_many_digits_are_a_bad_request(client):
    body = b'{"model_id": "local/tiny", "ratio": ' + b"9" * 5000 + b"}"
    answer = client.post("/jobs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    "members",
    [
        {"options": {"ignore": [0] * 300_000}},
        {"options": {"export": [0] * 300_000}},
        {"options": {"kinds": ["x"] * 200_000}},
        {"options": {f"k{index}": 0 for index in range(80_000)}},
        {"evaluate": {"tasks": ["x"] * 200_000}},
        {"metadata": {f"k{index}": 0 for index in range(80_000)}},
        {f"k{index}": 0 for index in range(80_000)},
    ],
)
def test_a_body_with_too_many_members_is_one_error(client, members):
    started = time.process_time()
    answer = client.post("/jobs", json=BODY | members)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert len(answer.json()["errors"]) == 1
    assert "1024 members" in answer.json()["detail"]
    assert len(answer.content) < 1500
    assert time.process_time() - started < 4
