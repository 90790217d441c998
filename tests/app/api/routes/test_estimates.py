from dataclasses import replace

import pytest

from rocket_core.estimates import estimate as estimate_module
from rocket_core.sizes.budget import parameter_budget
from rocket_core.system.machine_speed import MachineSpeed
from tests.app.api.conftest import BODY
from tests.reference.safetensors_files import LINEARS, save_llama
from tests.reference.tiny_models import byte_tokenizer

SPEED = MachineSpeed(products=1e11, rough_products=1e11, memory=1e10)
PARAMETERS = 2 * sum(rows * columns for rows, columns in LINEARS.values())


def estimate(client, **changes):
    answer = client.post("/estimates", json=BODY | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_estimate_predicts_a_job_without_creating_one(client, settings):
    told = estimate(client)
    assert told["parameters"] == PARAMETERS + 320 * 32 + 32
    assert told["stored_bytes"] == 4 * told["parameters"]
    assert told["compressible_parameters"] == PARAMETERS
    assert told["kept_parameters"] == parameter_budget(PARAMETERS, 0.3)
    assert told["factored_bytes"] < told["stored_bytes"]
    assert told["calibration_tokens"] == 256 * 256
    assert told["ratio"] == told["nearest_ratio"] == 0.3
    assert told["disk_bytes"] > told["stored_bytes"]
    assert told["memory_bytes"] > 2**28
    assert told["available"]["disk_bytes"] > 0
    assert told["commit"] is None
    assert client.get("/jobs").json()["data"] == []


def test_an_estimate_depends_on_the_request(client):
    whole = estimate(client)
    fewer = estimate(client, calibration={"samples": 4, "sequence_length": 32})
    assert fewer["calibration_tokens"] == 128
    assert fewer["memory_bytes"] < whole["memory_bytes"]
    part = estimate(client, options={"ignore": ["*.mlp.*"], "export": ["rocket"], "dtype": "float16"})
    assert part["compressible_parameters"] == 2 * 2 * (32 * 32 + 16 * 32)
    assert part["disk_bytes"] < whole["disk_bytes"]


def test_without_calibration_nothing_is_read_and_less_is_needed(client, monkeypatch):
    monkeypatch.setattr(estimate_module, "has_accelerator", lambda: False)
    monkeypatch.setattr(estimate_module, "measure_speed", lambda: SPEED)
    size = {"ratio": None, "bits": 6, "calibration": {}}
    usual, instant = (estimate(client, **size, options={"preset": preset}) for preset in ("fast", "instant"))
    assert instant["calibration_tokens"] == 0
    assert instant["seconds"] < usual["seconds"]
    assert instant["memory_bytes"] < usual["memory_bytes"]


def test_an_evaluation_adds_disk_space_for_its_logits(client):
    plain = estimate(client)
    evaluated = estimate(client, evaluate={"samples": 10, "sequence_length": 16, "stride": 4})
    # Its config.json does not give the vocabulary; the embeddings and the last norm have room for 321.
    assert evaluated["disk_bytes"] == plain["disk_bytes"] + 10 * 4 * 321 * 4
    assert evaluated["memory_bytes"] >= plain["memory_bytes"]


def test_an_estimate_refuses_what_a_job_would_be_refused_for(client, settings):
    save_llama(settings.models_folder / "odd", dtype="I8")
    for change in (
        {"ratio": 0.95},
        {"ratio": 2},
        {"model_id": "local/odd"},
        {"options": {"ignore": ["*.q_prj"]}},
        {"model_id": "local/none"},
        {"calibration": {"dataset": "local/none.txt"}},
        {"calibration": {"dataset": "upload/" + "0" * 32}},
        {"evaluate": {"dataset": "local/none.txt"}},
        {"evaluate": {"dataset": "upload/" + "0" * 32}},
        {"evaluate": {"tasks": ["local/none.jsonl"]}},
        {"evaluate": {"sequence_length": 2**20}},
        {"evaluate": {"samples": 65536, "sequence_length": 1024}},
    ):
        answers = [client.post(path, json=BODY | change) for path in ("/jobs", "/estimates")]
        assert answers[0].status_code == answers[1].status_code >= 400
        told = [{**answer.json(), "request_id": None} for answer in answers]
        assert told[0] == told[1]


@pytest.mark.parametrize(
    ("config", "evaluate", "reason"),
    [
        ({"architectures": ["BertForMaskedLM"]}, {"prompts": ["Hi"]}, "answers no prompts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {"tasks": ["arc_easy"]}, "leave tasks out"),
        ({"max_position_embeddings": 64}, {"prompts": ["Hi"], "answer_tokens": 64}, "no room for a prompt"),
        ({"max_position_embeddings": 64}, {"prompts": ["Hi"], "answer_tokens": 63}, None),
        ({"architectures": ["BertForMaskedLM"]}, {}, None),
    ],
)
def test_prompts_that_no_model_could_answer_are_refused(client, settings, config, evaluate, reason):
    save_llama(settings.models_folder / "odd", config={"model_type": "llama"} | config)
    body = BODY | {"model_id": "local/odd", "evaluate": evaluate, "calibration": {"sequence_length": 32}}
    for path, accepted in (("/jobs", 202), ("/estimates", 200)):
        answer = client.post(path, json=body)
        assert answer.status_code == (accepted if reason is None else 422)
        assert reason is None or reason in answer.json()["detail"]


def test_a_prompt_that_leaves_no_room_is_refused_at_once(client, settings):
    folder = settings.models_folder / "worded"
    save_llama(folder, config={"model_type": "llama", "max_position_embeddings": 64})
    byte_tokenizer().save_pretrained(folder)
    for length, accepted in ((60, True), (61, False)):
        prompts = ["Hi", "x" * length]
        body = BODY | {"model_id": "local/worded", "evaluate": {"prompts": prompts, "answer_tokens": 4}}
        for path in ("/jobs", "/estimates"):
            answer = client.post(path, json=body | {"calibration": {"sequence_length": 32}})
            assert (answer.status_code < 400) == accepted, answer.text
            assert accepted or "prompt 2 has 61 tokens, and an answer of 4 does not fit" in answer.json()["detail"]


def test_calibration_on_audio_is_refused_for_a_model_of_text(client, settings):
    settings.datasets_folder.mkdir(parents=True, exist_ok=True)
    (settings.datasets_folder / "spoken.jsonl").write_text('{"audio": "1.wav", "text": "a"}')
    (settings.datasets_folder / "1.wav").write_bytes(b"RIFF")
    for path in ("/jobs", "/estimates"):
        answer = client.post(path, json=BODY | {"calibration": {"dataset": "local/spoken.jsonl"}})
        assert answer.status_code == 422, answer.text
        assert "local/spoken.jsonl, line 1 names audio, and local/" in answer.json()["detail"]
        assert "it reads no audio with text; give text alone" in answer.json()["detail"]


def test_availability_is_unknown_for_remote_workers(app, client):
    from pydantic import SecretStr

    app.state.context.settings.__dict__["broker_url"] = SecretStr("redis://elsewhere")
    told = estimate(client)
    assert told["available"] is told["seconds"] is None
    assert told["seconds_unknown"] == "jobs run on other machines, whose speed is not known here"


def test_the_time_of_jobs_here_is_known_or_said_not_to_be(client, monkeypatch):
    monkeypatch.setattr(estimate_module, "has_accelerator", lambda: False)
    monkeypatch.setattr(estimate_module, "measure_speed", lambda: SPEED)
    seconds = estimate(client)["seconds"]
    assert seconds > 1
    monkeypatch.setattr(estimate_module, "measure_speed", lambda: replace(SPEED, products=SPEED.products / 1e6))
    assert estimate(client)["seconds"] > 2 * seconds
    best = {"options": {"preset": "best"}}
    for change in ({"ratio": None, "bits": 4}, {"ratio": None, "target_bytes": 100_000}, best):
        told = estimate(client, **change)
        assert (told["seconds"] > 1, told["seconds_unknown"]) == (True, None)
    for more in ({"evaluate": {"samples": 4}}, {"options": {"heal_tokens": 10_000}}):
        assert estimate(client, **more)["seconds"] > seconds
    tasks = {"evaluate": {"tasks": ["piqa"]}}
    for change, said in ((tasks, "an evaluation on tasks"), ({"options": {"preset": "paper"}}, "sparse")):
        told = estimate(client, **change)
        assert told["seconds"] is None
        assert said in told["seconds_unknown"]
    monkeypatch.setattr(estimate_module, "has_accelerator", lambda: True)
    told = estimate(client)
    assert (told["seconds"], "GPU" in told["seconds_unknown"]) == (None, True)


def test_little_selected_is_warned_of_by_estimate_and_job(client):
    ignore = {"options": {"ignore": ["*.mlp.*"], "export": ["rocket"]}}
    told = estimate(client, **ignore)
    assert told["selected_bytes"] == 4 * told["compressible_parameters"]
    assert told["selected_bytes"] < told["stored_bytes"] / 2
    assert "fewer ignored layers" in told["warnings"][0]
    job = client.post("/jobs", json=BODY | ignore).json()
    assert job["warnings"] == told["warnings"]
    assert client.get(f"/jobs/{job['id']}").json()["warnings"] == told["warnings"]
    assert client.post(f"/jobs/{job['id']}/cancel").status_code < 300
    assert client.post(f"/jobs/{job['id']}/retry").json()["warnings"] == told["warnings"]
    assert estimate(client)["warnings"] == []


def test_images_of_calibration_data_are_judged_at_submission(client, settings):
    folder = settings.datasets_folder
    folder.mkdir(exist_ok=True)
    (folder / "captions.jsonl").write_text('{"image": "1.png", "text": "a"}\n')
    body = BODY | {"calibration": {"dataset": "local/captions.jsonl"}}
    for _ in range(2):
        answer = client.post("/jobs", json=body)
        assert answer.status_code == 422
        assert answer.json()["code"] == "calibration_failed"
        assert str(folder) not in answer.text
        if "1.png" in answer.text:
            assert "does not exist" in answer.text
        (folder / "1.png").write_bytes(b"\x89PNG")
    assert "reads no images with text" in answer.text
    answer = client.post("/jobs", json=BODY | {"options": {"include": ["vision"], "export": ["rocket"]}})
    assert "has no tower that encodes images" in answer.text


def test_a_memory_is_divided(client, settings):
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64}
    save_llama(settings.models_folder / "full", config=sizes)
    asked = {"model_id": "local/full", "ratio": None, "options": {}, "calibration": {"sequence_length": 32}}
    told = estimate(client, **asked, fit={"memory_bytes": 1_120_000, "context": 16})
    fit = told["fit"]
    # Two layers keep two heads of eight numbers in float32, twice.
    assert (fit["cache_bytes"], fit["memory_bytes"], fit["batch"]) == (16 * 2 * 2 * 16 * 4, 1_120_000, 1)
    left = fit["memory_bytes"] - fit["cache_bytes"] - fit["engine_bytes"]
    assert told["factored_bytes"] == left < told["stored_bytes"]
    assert estimate(client)["fit"] is None
    for changes, said in (
        ({"context": 65}, "a context of 65 tokens is longer than the 64 that local/full attends to"),
        ({"memory_bytes": 10_000}, "10kB leave nothing for weights: keys and values of 16 tokens take 4.096kB"),
        ({"memory_bytes": 997_000}, "is out of reach"),
    ):
        answer = client.post(
            "/estimates", json=BODY | asked | {"fit": {"memory_bytes": 1_120_000, "context": 16} | changes}
        )
        assert answer.status_code == 422
        assert said in answer.json()["detail"]
