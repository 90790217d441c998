import inspect
import json
import re
import subprocess
import sys

import httpx2
import pytest

from app.shared.requests import AcceptanceRequest, CalibrationRequest, EvaluationRequest, JobOptions
from rocket_cli.commands import submit
from rocket_cli.option_groups import expand_groups
from rocket_core.errors import HubUnavailableError
from tests.loopback_service import free_port, in_background, wait_for


def submitted(client):
    return client.list_jobs().data[0]


def test_the_id_goes_to_stdout_and_the_next_step_to_stderr(remote, client):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3")

    job = submitted(client)
    assert (outcome.code, outcome.out) == (0, f"{job.id}\n")
    assert outcome.err == f"rocket: submitted; `rocket watch {job.id}` shows its progress\n"


def test_unset_options_are_not_sent(remote, monkeypatch):
    sent = []
    send = httpx2.Client.stream

    def spy(self, **request):
        sent.append(request["json"])
        return send(self, **request)

    monkeypatch.setattr(httpx2.Client, "stream", spy)
    remote("submit", "local/tiny", "--ratio", "0.3")

    assert sent == [{"model_id": "local/tiny", "ratio": 0.3}]


def test_every_option_reaches_the_server(remote, client):
    options = (
        "--ratio 0.2 --calibration local/mine.jsonl --samples 3 --sequence-length 64 --seed 1 --objective whitened "
        "--ignore *.q_proj --ignore *.k_proj --export dense --dtype float32 --precision float64 --metadata a=b "
        "--metadata c=d=e --idempotency-key mine --evaluate builtin --evaluate-samples 2 --evaluate-length 32 "
        "--evaluate-stride 16 --task arc_easy --task-items 9 --benchmark "
        "--prompt One --prompt Two --answer-tokens 5 --accept-kl 0.05 --accept-perplexity-increase 2% "
        "--accept-task-drop 1%"
    )

    assert remote("submit", "local/tiny", *options.split()).code == 0

    job = submitted(client)
    assert (job.model_id, job.ratio, job.metadata) == ("local/tiny", 0.2, {"a": "b", "c": "d=e"})
    assert job.benchmark
    assert job.accept.model_dump() == {"max_kl": 0.05, "max_perplexity_increase": 0.02, "max_task_drop": 0.01}
    assert job.calibration.model_dump() == {
        "dataset": "local/mine.jsonl",
        "samples": 3,
        "sequence_length": 64,
        "seed": 1,
    }
    assert job.evaluate.model_dump() == {
        "dataset": "builtin",
        "samples": 2,
        "sequence_length": 32,
        "stride": 16,
        "tasks": ("arc_easy",),
        "task_items": 9,
        "prompts": ("One", "Two"),
        "answer_tokens": 5,
    }
    wanted = {
        "objective": "whitened",
        "ignore": ["*.q_proj", "*.k_proj"],
        "export": ["dense"],
        "dtype": "float32",
        "precision": "float64",
    }
    assert wanted.items() <= job.options.items()
    assert (
        client.submit(
            "local/tiny",
            ratio=0.2,
            calibration=job.calibration.model_dump(),
            evaluate=job.evaluate.model_dump(),
            accept=job.accept.model_dump(),
            benchmark=True,
            options=job.options,
            metadata=job.metadata,
            idempotency_key="mine",
        ).id
        == job.id
    )


def test_every_option_is_a_field_of_the_request():
    parameters = set(inspect.signature(expand_groups(submit.submit)).parameters)
    text = {"calibration", "calibration_column", *CalibrationRequest.model_fields} - {"dataset", "column"}
    assert text <= parameters
    evaluation = {"evaluate", "evaluate_samples", "evaluate_length", "evaluate_stride", "task", "task_items"}
    evaluation |= {"prompt", "answer_tokens"}
    assert len(evaluation) == len(EvaluationRequest.model_fields)
    bounds = {f"accept_{name.removeprefix('max_')}" for name in AcceptanceRequest.model_fields}
    assert evaluation | bounds <= parameters
    own = {
        "model_id",
        "earlier",
        "ratio",
        "size",
        "bits",
        "fit",
        "context",
        "batch",
        "kv_bits",
        "max_kl",
        "max_perplexity_increase",
        "benchmark",
        "heal",
        "revision",
        "metadata",
        "queue",
        "idempotency_key",
        "hub_token_env",
        "watch",
        "server",
        "as_json",
    }
    assert parameters - text - evaluation - bounds - own <= set(JobOptions.model_fields)


def test_json_output_is_the_job(remote, client):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--json")

    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out) == submitted(client).model_dump(mode="json")


def test_watching_ends_with_the_result(remote, client, service):
    def work():
        wait_for(lambda: client.list_jobs().data)
        lease = service.claim(submitted(client).id)
        service.progress(lease, "calibrating", 0.5)
        service.succeed(lease, {})

    with in_background(work):
        outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--watch")

    job = submitted(client)
    lines = outcome.out.splitlines()
    assert outcome.code == 0
    assert lines[0] == job.id
    assert lines[1].startswith(f"{job.id} succeeded in ")
    assert "Parameters: 7M of 10M compressible ones kept, 30.0% removed" in lines
    assert f"rocket download {job.id}" in lines[-1]


@pytest.mark.parametrize(
    ("model", "near"),
    [("local/tiney", "local/tiny"), ("tiny", "local/tiny"), ("tinny", "local/tiny"), ("local/elephant", None)],
)
def test_an_unknown_model_is_answered_with_suggestions(remote, model, near):
    outcome = remote("submit", model, "--ratio", "0.3")

    assert outcome.code in {2, 3}
    assert f"{model!r} is not accepted" in outcome.err
    assert "this server has local/tiny" in outcome.err
    assert (f"did you mean {near}?" in outcome.err) == (near is not None)


def test_a_path_is_answered_with_what_to_do(remote, tmp_path):
    (tmp_path / "my model").mkdir()

    outcome = remote("submit", tmp_path / "my model", "--ratio", "0.3")

    assert outcome.code == 2
    assert "servers do not accept paths; copy it into the server's models folder" in outcome.err


def test_an_unknown_dataset_is_answered_with_suggestions(remote):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--calibration", "wikitxt2")

    assert outcome.code == 2
    assert "did you mean wikitext2?" in outcome.err
    assert "local/mine.jsonl" in outcome.err


def test_of_two_datasets_the_unknown_one_is_named(remote):
    known = ("--calibration", "local/mine.jsonl")
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", *known, "--evaluate", "local/main.jsonl")

    assert outcome.code == 3
    assert "'local/main.jsonl' is not accepted" in outcome.err
    assert "did you mean local/mine.jsonl?" in outcome.err


@pytest.mark.parametrize("command", [("submit", "--ratio", "0.3"), ("estimate", "--size", "4MB"), ("profile",)])
def test_a_pattern_that_matches_no_layer_is_named(remote, client, command):
    wrong = ("--ignore", "*.q_proj", "--ignore", "*.dwn_proj")
    outcome = remote(command[0], "local/tiny", *command[1:], *wrong)

    assert outcome.code == 2
    assert "--ignore '*.dwn_proj': " in outcome.err
    assert "did you mean '*.down_proj'?" in outcome.err
    assert client.list_jobs().data == ()


@pytest.mark.parametrize(
    ("ratio", "code", "said"), [("1.5", 2, "less than 1"), ("nan", 2, "ratio"), ("0.99", 4, "0.99")]
)
def test_an_impossible_ratio_is_refused(remote, client, ratio, code, said):
    outcome = remote("submit", "local/tiny", "--ratio", ratio)

    assert outcome.code == code
    assert said in outcome.err
    assert outcome.out == ""
    assert client.list_jobs().data == ()


def test_a_refusal_is_json_for_programs(remote):
    outcome = remote("submit", "local/elephant", "--ratio", "0.3", "--json")

    error = json.loads(outcome.out)["error"]
    assert outcome.code == 3
    assert (error["code"], error["status"]) == ("model_not_found", 422)
    assert error["request_id"]


def test_an_invalid_label_is_wrong_usage(remote):
    outcome = remote("submit", "local/tiny", "--ratio", "0.3", "--metadata", "team")

    assert outcome.code == 2
    assert "KEY=VALUE" in outcome.err


def test_without_a_server_the_serve_command_is_suggested(rocket, monkeypatch):
    monkeypatch.setattr("rocket_cli.connection.COMMAND_PATIENCE", 0.3)
    url = f"http://127.0.0.1:{free_port()}"

    outcome = rocket("submit", "local/tiny", "--ratio", "0.3", "--server", url)

    assert outcome.code == 75
    assert f"{url} does not answer (Connection refused); retrying for 0 s" in outcome.err
    assert "start it with `rocket serve`" in outcome.err


def test_a_server_other_than_the_default_is_named(rocket, server):
    outcome = rocket("submit", "local/tiny", "--ratio", "0.3", "--server", server.url)

    assert f"rocket watch {outcome.out.strip()} --server {server.url}" in outcome.err


def test_client_commands_load_neither_the_service_nor_torch(server):
    code = (
        "import sys\nfrom rocket_cli.main import main\n"
        "try:\n    main(['jobs'])\nfinally:\n    print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={"ROCKET_SERVER": server.url}, capture_output=True, text=True, check=True
    )
    imported = set(json.loads(result.stdout.splitlines()[-1].replace("'", '"')))
    assert imported.isdisjoint({"app", "worker", "torch", "transformers", "fastapi", "sqlalchemy"})


def test_a_misspelt_local_model_differs_from_an_unreachable_hub(remote, server, monkeypatch):
    monkeypatch.setattr("rocket_cli.connection.COMMAND_PATIENCE", 0)

    def admit(*_):
        raise HubUnavailableError("the Hub cannot be reached")

    monkeypatch.setattr(type(server.application.state.context.admission), "admit", admit)

    outcome = remote("submit", "lokal/tiny", "--ratio", "0.3")
    assert outcome.code == 75
    assert "the Hub cannot be reached" in outcome.err
    assert "did you mean local/tiny, which this server has?" in outcome.err
    assert "did you mean" not in remote("submit", "big/other", "--ratio", "0.3").err


def test_a_busy_server_is_not_called_unresponsive(remote, server, monkeypatch):
    monkeypatch.setattr("app.api.problems.RETRY_AFTER_SECONDS", 1)
    admission = type(server.application.state.context.admission)
    real, asked = admission.admit, []

    def busy_once(*arguments):
        asked.append(1)
        if len(asked) == 1:
            raise HubUnavailableError("later")
        return real(*arguments)

    monkeypatch.setattr(admission, "admit", busy_once)

    outcome = remote("submit", "local/tiny", "--ratio", "0.3")
    assert outcome.code == 0
    assert f"{server.url} is busy (later); retrying for" in outcome.err
    assert "does not answer" not in outcome.err


def test_an_earlier_job_is_submitted_with_another_preset(remote, client):
    options = (
        "--size 3MB --samples 9 --sequence-length 64 --seed 3 --for vllm --preset fast --ignore *.q_proj "
        "--evaluate builtin --evaluate-samples 2 --accept-kl 0.5 --benchmark"
    )
    outcome = remote("submit", "local/tiny", *options.split())
    assert outcome.code == 0, outcome.err
    first = outcome.out.strip()
    earlier = client.get_job(first)

    outcome = remote("submit", "--from", first, "--preset", "best", "--seed", "4", "--metadata", "a=b")

    assert outcome.code == 0
    job = submitted(client)
    assert job.id != first
    assert (job.model_id, job.target_bytes, job.evaluate, job.accept, job.benchmark) == (
        ("local/tiny", 3_000_000, earlier.evaluate, earlier.accept, True)
    )
    assert job.calibration == earlier.calibration.model_copy(update={"seed": 4})
    named = {name: job.options[name] for name in ("preset", "engine", "export", "ignore")}
    assert named == {"preset": "best", "engine": "vllm", "export": ["compressed-tensors"], "ignore": ["*.q_proj"]}
    changed = {name for name, value in job.options.items() if value != earlier.options[name]}
    assert {"preset"} < changed, "settings that follow from the preset are not the earlier job's"
    assert job.metadata == {"a": "b", "improves": first}


def test_a_job_without_calibration_gets_the_default_one(remote, client):
    first = remote("submit", "local/tiny", "--bits", "5", "--preset", "instant").out.strip()

    assert remote("submit", "--from", first, "--preset", "fast").code == 0
    job = submitted(client)
    assert (job.bits, job.options["preset"]) == (5, "fast")
    assert job.calibration.samples == CalibrationRequest().samples


def test_a_memory_of_an_earlier_job_is_asked_for_again(remote, client):
    outcome = remote("submit", "local/tiny", "--fit", "10.3MB", "--context", "16", "--batch", "2")
    assert outcome.code == 0, outcome.err
    first = outcome.out.strip()

    assert remote("submit", "--from", first, "--preset", "best").code == 0
    assert submitted(client).fit == client.get_job(first).fit is not None


def test_another_target_replaces_that_of_an_earlier_job(remote, client):
    first = remote("submit", "local/tiny", "--ratio", "0.3").out.strip()

    assert remote("submit", "--from", first, "--size", "3MB").code == 0
    job = submitted(client)
    assert (job.ratio, job.target_bytes) == (None, 3_000_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "0.3"], "specify either MODEL_ID or --from JOB"),
        (["local/tiny", "--from", "some", "--ratio", "0.3"], "specify either MODEL_ID or --from JOB"),
        (["--from", "00000000-0000-0000-0000-000000000000"], "no job has this id"),
    ],
)
def test_what_is_submitted_must_be_clear(remote, arguments, message):
    outcome = remote("submit", *arguments)
    assert outcome.code != 0
    assert re.search(message, outcome.err)
