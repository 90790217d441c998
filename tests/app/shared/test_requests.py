import hashlib
import json

import pytest
from pydantic import ValidationError

from app.shared.requests import (
    AllocationRequest,
    CalibrationRequest,
    CompressionRequest,
    EvaluationRequest,
    HealingRequest,
    JobOptions,
    JobRequest,
)
from app.shared.resource_requests import AnnouncedFile
from rocket_core.config import AcceptanceConfig, CompressionConfig, EvaluationConfig

SOURCE = "job_" + "0" * 26


def test_only_model_and_ratio_are_required():
    request = JobRequest.model_validate({"model_id": "Qwen/Qwen3-0.6B", "ratio": 0.3})
    assert request.options.export == ("rocket",)
    assert request.calibration.samples == 256


def test_a_request_survives_json():
    request = JobRequest(model_id="local/x", ratio=0.3, options={"ignore": ["*.down_proj"]}, metadata={"a": "b"})
    assert JobRequest.model_validate(json.loads(request.model_dump_json())) == request


def test_options_match_the_settings_of_the_library():
    operator = {
        "ratio",
        "target_bytes",
        "bits",
        "fit",
        "max_kl",
        "max_perplexity_increase",
        "calibration",
        "evaluate",
        "accept",
        "benchmark",
        "device",
        "max_shard_bytes",
        "statistics_quota_bytes",
    }
    assert set(JobOptions.model_fields) == set(CompressionConfig.model_fields) - operator
    request = JobRequest(model_id="local/x", ratio=0.3)
    # A service offers both exports, as earlier versions did; the library writes one.
    assert request.compression_config() == CompressionConfig(ratio=0.3)
    vllm = JobRequest(model_id="local/x", bits=5, options={"engine": "vllm"})
    assert vllm.compression_config() == CompressionConfig(bits=5, engine="vllm")


def test_the_worker_sets_device_and_dataset_path():
    request = JobRequest(model_id="local/x", ratio=0.3, calibration={"dataset": "local/a.jsonl"})
    config = request.compression_config(device="cpu", dataset="/data/a.jsonl")
    assert (config.device, config.calibration.dataset) == ("cpu", "/data/a.jsonl")


@pytest.mark.parametrize("model_id", ["Qwen/Qwen3-0.6B", "local/tiny-llama", "a/b", "local/model.v1_2"])
def test_valid_model_ids_are_accepted(model_id):
    assert JobRequest(model_id=model_id, ratio=0.3).model_id == model_id


@pytest.mark.parametrize(
    "model_id",
    [
        "",
        "gpt2",
        "../etc",
        "/etc/passwd",
        "local/../x",
        "local/..",
        "local/.hidden",
        "local/a/b",
        "local/x\n",
        "local/x\x00",
        "https://example.org/x",
        "a/b.git",
        "a/b--c",
        "a\\b",
        "local/" + "x" * 97,
        "local/é",
    ],
)
def test_invalid_model_ids_are_refused(model_id):
    with pytest.raises(ValidationError):
        JobRequest(model_id=model_id, ratio=0.3)


@pytest.mark.parametrize(
    "dataset",
    ["../x.jsonl", "/etc/passwd", "local/../x", "unknown", "local/", "file.txt", "local/x:train", "upload/x:train"],
)
def test_a_dataset_is_never_a_path(dataset):
    with pytest.raises(ValidationError):
        JobRequest(model_id="local/x", ratio=0.3, calibration={"dataset": dataset})


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 1.0},
        {"ratio": -0.1},
        {"ratio": float("nan")},
        {"unknown": 1},
        {"calibration": {"samples": 0}},
        {"options": {"device": "cuda"}},
        {"options": {"export": []}},
        {"options": {"export": ["dense", "dense"]}},
        {"options": {"ridge": float("inf")}},
        {"revision": "../main", "model_id": "a/b"},
        {"revision": "main"},
        {"metadata": {f"k{number}": "v" for number in range(17)}},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {"k" * 65: "v"}},
        {"metadata": {"k": "nul\x00"}},
        {"metadata": {"k\x00": "v"}},
        {"options": {"ignore": ["half\ud800"]}},
    ],
)
def test_impossible_or_unstorable_values_are_refused(change):
    with pytest.raises(ValidationError):
        JobRequest.model_validate({"model_id": "local/x", "ratio": 0.3} | change)


@pytest.mark.parametrize("request_type", [JobRequest, AllocationRequest])
def test_the_schema_of_a_ratio_has_its_bounds(request_type):
    ratio, null = request_type.model_json_schema()["properties"]["ratio"]["anyOf"]
    assert ratio == {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    assert null == {"type": "null"}


def test_the_fingerprint_is_independent_of_spelling_out_defaults():
    plain = JobRequest(model_id="local/x", ratio=0.3)
    spelt = JobRequest(model_id="local/x", ratio=0.3, calibration={"samples": 256}, options={"preset": "fast"})
    other = JobRequest(model_id="local/x", ratio=0.31)
    assert plain.fingerprint() == spelt.fingerprint()
    assert plain.fingerprint() != other.fingerprint()


def test_a_data_set_on_the_hub_is_named_with_its_split():
    request = JobRequest(model_id="local/x", ratio=0.3, calibration={"dataset": "org/name:train", "column": "chosen"})
    assert request.asks_the_hub
    assert request.compression_config().calibration.column == "chosen"
    assert not JobRequest(model_id="local/x", ratio=0.3).asks_the_hub


def test_a_fingerprint_includes_settings_of_rows_only_if_given():
    plain = JobRequest(model_id="local/x", ratio=0.3)
    given = [{"column": "body"}, {"skip_bad_rows": True}, {"pack": False}]
    others = [JobRequest(model_id="local/x", ratio=0.3, calibration=settings) for settings in given]
    assert len({request.fingerprint() for request in (plain, *others)}) == 4
    same = JobRequest(model_id="local/x", ratio=0.3, calibration={"column": None, "pack": True})
    assert same.fingerprint() == plain.fingerprint()


def test_healing_on_another_text_reads_its_rows_as_usual():
    original = JobRequest(model_id="local/x", ratio=0.3, calibration={"dataset": "o/n:train", "column": "body"})
    other = HealingRequest(tokens=10, dataset="c4").job_request("job_" + "0" * 26, original, None)
    same = HealingRequest(tokens=10).job_request("job_" + "0" * 26, original, None)
    assert (other.calibration.column, same.calibration.column) == (None, "body")


def test_a_fingerprint_includes_an_evaluation_only_if_requested():
    plain = JobRequest(model_id="local/x", ratio=0.3)
    evaluated = JobRequest(model_id="local/x", ratio=0.3, evaluate={})
    newer = {
        "queue": True,
        "evaluate": True,
        "accept": True,
        "target_bytes": True,
        "bits": True,
        "fit": True,
        "max_kl": True,
        "max_perplexity_increase": True,
        "benchmark": True,
        "source_job_id": True,
        "on_source": True,
        "export_to": True,
        "push": True,
        "calibration": {"column", "skip_bad_rows", "pack"},
        "options": {
            "calibrate_all_experts",
            "code_bits",
            "engine",
            "group_size",
            "heal_tokens",
            "include",
            "refine",
            "storage",
            "token_weights",
            "value_bits",
        },
    }
    stored = plain.model_dump_json(exclude=newer)
    assert plain.fingerprint() == hashlib.sha256(stored.encode()).hexdigest()
    assert evaluated.fingerprint() != plain.fingerprint()
    assert evaluated.fingerprint() == JobRequest(model_id="local/x", ratio=0.3, evaluate={"samples": 64}).fingerprint()


def test_bounds_are_of_the_request_and_not_of_later_work():
    given = {"model_id": "local/x", "ratio": 0.3, "evaluate": {}}
    plain, judged = JobRequest(**given), JobRequest(**given, accept={"max_kl": 0.05})
    assert judged.fingerprint() != plain.fingerprint()
    assert judged.compression_config().accept == AcceptanceConfig(max_kl=0.05)
    for later in (EvaluationRequest(), HealingRequest(tokens=10)):
        assert later.job_request(SOURCE, judged, None).accept is None


def test_a_fingerprint_includes_prompts_only_if_given():
    plain, prompted, later = (
        JobRequest(model_id="local/x", ratio=0.3, **given)
        for given in (
            {"evaluate": {"answer_tokens": 3}},
            {"evaluate": {"answer_tokens": 3, "prompts": ["a"]}},
            {"evaluate": {}, "source_job_id": SOURCE, "on_source": "evaluation"},
        )
    )
    assert len({request.fingerprint() for request in (plain, prompted, later)}) == 3
    assert (prompted.kind, later.kind) == ("compression", "evaluation")
    assert later.datasets == ("builtin",)


def test_only_an_export_names_a_format():
    export = JobRequest(model_id="a/b", ratio=0.3, source_job_id=SOURCE, on_source="export", export_to="gguf")
    assert (export.kind, export.source_export, export.datasets) == ("export", "rocket", ())
    assert not export.reads_model
    assert not export.asks_the_hub
    for given in ({"on_source": "export"}, {"on_source": "healing", "export_to": "dense"}):
        with pytest.raises(ValidationError, match="export_to belongs to"):
            JobRequest(model_id="a/b", ratio=0.3, source_job_id=SOURCE, **given)


def test_only_a_push_names_a_repository():
    target = {"repository": "alice/small", "export": "gguf"}
    push = JobRequest(model_id="local/x", ratio=0.3, source_job_id=SOURCE, on_source="push", push=target)
    assert (push.kind, push.source_export, push.datasets) == ("push", "gguf", ())
    assert not push.reads_model
    assert push.asks_the_hub
    for given in ({"on_source": "push"}, {"on_source": "healing", "push": target}):
        with pytest.raises(ValidationError, match="push belongs to"):
            JobRequest(model_id="a/b", ratio=0.3, source_job_id=SOURCE, **given)


def test_a_client_cannot_name_the_job_that_it_works_on():
    with pytest.raises(ValidationError, match="use POST /jobs"):
        CompressionRequest(model_id="local/x", ratio=0.3, evaluate={}, source_job_id=SOURCE, on_source="evaluation")
    assert {"source_job_id", "on_source", "export_to", "push"}.isdisjoint(
        CompressionRequest.model_json_schema()["properties"]
    )


def test_a_source_and_what_is_done_with_it_go_together():
    with pytest.raises(ValidationError, match="belong together"):
        JobRequest(model_id="local/x", ratio=0.3, source_job_id=SOURCE)


def test_a_fingerprint_includes_a_benchmark_only_if_requested():
    plain, without, measured = (
        JobRequest(model_id="local/x", ratio=0.3, **given) for given in ({}, {"benchmark": False}, {"benchmark": True})
    )
    assert without.fingerprint() == plain.fingerprint() != measured.fingerprint()
    assert measured.compression_config().benchmark


@pytest.mark.parametrize("target", [{"target_bytes": 1000}, {"bits": 4.5}, {"max_kl": 0.1}])
def test_a_target_in_bytes_is_stored_with_that_budget(target):
    request = JobRequest(model_id="local/x", **target)
    assert request.options.budget == "bytes"
    assert JobRequest.model_validate_json(request.model_dump_json()) == request


def test_a_bound_on_the_loss_is_measured():
    plain = JobRequest(model_id="local/x", max_kl=0.1)
    assert plain.evaluate == EvaluationRequest()
    other = JobRequest(model_id="local/x", max_kl=0.1, calibration={"dataset": "local/a.txt"})
    assert other.evaluate.dataset == "local/a.txt"
    asked = JobRequest(model_id="local/x", max_perplexity_increase=0.1, evaluate={"samples": 3})
    assert (asked.evaluate.dataset, asked.evaluate.samples) == ("builtin", 3)
    assert len({request.fingerprint() for request in (plain, other, asked)}) == 3


def test_a_result_within_a_loss_is_healed_afterwards():
    with pytest.raises(ValidationError, match="heal the result, or give a size"):
        JobRequest(model_id="local/x", max_kl=0.1, options={"heal_tokens": 1000})
    original = JobRequest(model_id="local/x", max_kl=0.1)
    healing = HealingRequest(tokens=1000).job_request("job_" + "0" * 26, original, None)
    assert (healing.kind, healing.max_kl, healing.evaluate) == ("healing", 0.1, None)


def test_a_fingerprint_includes_the_bits():
    plain = JobRequest(model_id="local/x", bits=4)
    assert plain.fingerprint() == JobRequest(model_id="local/x", bits=4.0, options={"budget": "bytes"}).fingerprint()
    others = (JobRequest(model_id="local/x", bits=4.5), JobRequest(model_id="local/x", options={"budget": "bytes"}))
    assert len({request.fingerprint() for request in (plain, *others)}) == 3


def test_a_fingerprint_includes_the_format():
    prints = {
        JobRequest(model_id="local/x", options={"method": "gptq", "code_bits": bits}).fingerprint() for bits in (3, 4)
    }
    assert len(prints) == 2
    assert JobRequest(model_id="local/x", options={"method": "gptq"}).fingerprint() in prints


def test_evaluation_defaults_match_the_library():
    assert EvaluationRequest().model_dump() == EvaluationConfig().model_dump()


def test_the_worker_sets_the_paths_of_evaluation_data():
    evaluate = {"dataset": "local/a.jsonl", "tasks": ["arc_easy", "local/quiz.jsonl"], "samples": 3}
    request = JobRequest(model_id="local/x", ratio=0.3, evaluate=evaluate)
    assert request.datasets == ("builtin", "local/a.jsonl")
    assert request.local_tasks == ("local/quiz.jsonl",)

    config = request.compression_config(evaluate={"dataset": "/d/a.jsonl", "tasks": ("arc_easy", "/d/quiz.jsonl")})

    assert config.evaluate == EvaluationConfig(dataset="/d/a.jsonl", tasks=("arc_easy", "/d/quiz.jsonl"), samples=3)
    assert JobRequest(model_id="local/x", ratio=0.3).compression_config(evaluate={}).evaluate is None


@pytest.mark.parametrize(
    ("evaluate", "asks"),
    [
        (None, False),
        ({}, False),
        ({"dataset": "local/a.txt", "tasks": ["local/quiz.jsonl"]}, False),
        ({"dataset": "c4"}, True),
        ({"tasks": ["piqa"]}, True),
    ],
)
def test_asks_the_hub_is_true_for_remote_texts_and_tasks(evaluate, asks):
    assert JobRequest(model_id="local/x", ratio=0.3, evaluate=evaluate).asks_the_hub is asks


@pytest.mark.parametrize(
    "evaluate",
    [
        {"dataset": "/etc/passwd"},
        {"tasks": ["/etc/passwd"]},
        {"tasks": ["local/../quiz.jsonl"]},
        {"tasks": ["local/quiz.txt"]},
        {"tasks": ["mmlu"]},
        {"tasks": ["piqa", "piqa"]},
        {"tasks": [f"local/{number}.jsonl" for number in range(17)]},
        {"samples": 0},
        {"stride": 0},
        {"sequence_length": 32, "stride": 33},
        {"seed": 1},
    ],
)
def test_an_invalid_evaluation_is_refused(evaluate):
    with pytest.raises(ValidationError):
        JobRequest(model_id="local/x", ratio=0.3, evaluate=evaluate)


def test_too_deeply_nested_values_are_refused():
    nested = "x"
    for _ in range(5000):
        nested = [nested]
    for body in ({"metadata": {"a": nested}}, {"options": nested}, {"calibration": {"seed": nested}}):
        with pytest.raises(ValidationError):
            JobRequest.model_validate({"model_id": "a/b", "ratio": 0.3} | body)


@pytest.mark.parametrize("kind", [JobRequest, CompressionRequest])
@pytest.mark.parametrize("ratio", [1, 30, 1.5, 10**400])
def test_a_ratio_in_percent_is_refused_with_a_fraction(kind, ratio):
    with pytest.raises(ValidationError, match=r"to remove 30 %, write 0\.3") as refused:
        kind(model_id="local/tiny", ratio=ratio)
    assert refused.value.errors()[0]["loc"] == ("ratio",)


@pytest.mark.parametrize("value", ["1", "0.5", True, False])
@pytest.mark.parametrize(
    ("kind", "body", "member"),
    [
        (CompressionRequest, {"model_id": "a/b"}, "ratio"),
        (CompressionRequest, {"model_id": "a/b"}, "bits"),
        (CompressionRequest, {"model_id": "a/b"}, "target_bytes"),
        (CalibrationRequest, {}, "samples"),
        (EvaluationRequest, {}, "stride"),
        (HealingRequest, {}, "tokens"),
        (JobOptions, {}, "heal_tokens"),
        (AnnouncedFile, {"path": "config.json"}, "size"),
    ],
)
def test_a_number_is_neither_a_string_nor_a_boolean(kind, body, member, value):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body | {member: value})
    assert refused.value.errors()[0]["loc"] == (member,)


@pytest.mark.parametrize("value", ["true", "1", 0, 1])
def test_a_boolean_is_neither_a_string_nor_a_number(value):
    for body in ({"benchmark": value}, {"options": {"refine": value}}):
        with pytest.raises(ValidationError, match="valid boolean"):
            CompressionRequest.model_validate({"model_id": "a/b", "ratio": 0.3} | body)
