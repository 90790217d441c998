import inspect
import json
import shutil

import httpx2
import pytest

from rocket_cli.commands import estimate, submit
from rocket_cli.option_groups import expand_groups
from rocket_client.models import Available, Estimate
from tests.service_fixtures import TINY_LLAMA

# What a job has and an estimate does not need.
OF_A_JOB = {"earlier", "metadata", "queue", "idempotency_key", "watch"}
TOLD = Estimate(
    model_id="a/b",
    commit="0" * 40,
    parameters=1_000,
    stored_bytes=4_000,
    compressible_parameters=800,
    kept_parameters=400,
    factored_bytes=3_000,
    ratio=0.5,
    nearest_ratio=0.45,
    calibration_tokens=2048,
    memory_bytes=2 * 10**9,
    disk_bytes=3 * 10**9,
    available=Available(memory_bytes=10**9, disk_bytes=10**9),
)


@pytest.fixture
def answered(remote, monkeypatch):
    """Run the command with a response that no server has to send."""

    def run(**changes):
        told = TOLD.model_copy(update=changes)
        monkeypatch.setattr("rocket_client.client.Rocket.estimate", lambda *_, **__: told)
        return remote("estimate", "a/b", "--ratio", "0.5")

    return run


def rows(text):
    return {line[:22].strip(): line[22:].split() for line in text.splitlines() if line}


def test_an_estimate_shows_sizes_and_needs_and_creates_no_job(remote, client):
    outcome = remote("estimate", "local/tiny", "--ratio", "0.3", "--samples", "8")

    assert outcome.code == 0
    shown = rows(outcome.out)
    assert shown["parameters"] == ["2.76M", "2.05M", "-25.7%"]
    assert shown["of those, compressible"] == ["2.36M", "1.65M", "-30.0%"]
    assert shown["weights"] == ["5.51", "MB", "4.39", "MB", "-20.3%"]
    assert shown["memory"][1] in {"MB", "GB"}
    assert len(shown["memory"]) == len(shown["disk"]) == 4, "needed and free"
    assert "download" not in shown
    assert "Calibrates on at most 2,048 tokens" in outcome.out
    assert client.list_jobs().data == ()


def test_it_shows_the_matching_submit_command(remote):
    arguments = ("local/tiny", "--ratio", "0.3", "--ignore", "*.q_proj")

    assert remote("estimate", *arguments).err == (
        "rocket: to submit it as a job: rocket submit local/tiny --ratio 0.3 --ignore '*.q_proj'\n"
    )


def test_a_size_can_be_estimated(remote):
    assert rows(remote("estimate", "local/tiny", "--size", "4MB").out)["weights"][2:4] == ["4.00", "MB"]


def test_bits_can_be_estimated(remote):
    outcome = remote("estimate", "local/tiny", "--bits", "8")

    assert outcome.code == 0
    assert outcome.err.endswith("rocket submit local/tiny --bits 8\n")


def test_json_output_is_the_response(remote, client):
    outcome = remote("estimate", "local/tiny", "--ratio", "0.3", "--json")

    assert (outcome.code, outcome.err) == (0, "")
    told, again = json.loads(outcome.out), client.estimate("local/tiny", ratio=0.3).model_dump(mode="json")
    # Free resources change all the time.
    assert set(told.pop("available")) == set(again.pop("available")) == {"memory_bytes", "disk_bytes"}
    assert told == again


def test_shortages_and_uncertainties_are_shown(answered):
    outcome = answered()

    assert outcome.code == 0
    assert (
        "Ratios up to 0.45 are certain to be reachable; whether 0.5 is, is known once the layers are profiled"
        in outcome.out
    )
    assert "less free memory than that" in outcome.out
    assert "less free disk space than that" in outcome.out
    assert rows(outcome.out)["download"] == ["4.00", "kB"]


def test_unknown_free_resources_are_omitted(answered):
    shown = rows(answered(available=None, nearest_ratio=0.5).out)
    assert (shown["memory"], shown["disk"]) == (["2.00", "GB"], ["3.00", "GB"])
    unsaid = answered(available=Available(memory_bytes=None, disk_bytes=10**12)).out
    assert rows(unsaid)["memory"] == ["2.00", "GB", "-"]
    assert "less" not in unsaid


def test_the_time_is_shown_with_its_uncertainty(answered):
    shown = answered(seconds=120.0).out
    assert rows(shown)["time"] == ["about", "2", "min"]
    assert "The time is between 1 min 20 s and 3 min for most models" in shown
    unknown = answered(seconds_unknown="this machine has a GPU").out
    assert "time" not in rows(unknown)
    assert "How long it takes is not known: this machine has a GPU" in unknown


def test_its_options_equal_those_of_submit(remote, monkeypatch):
    taken = inspect.signature(expand_groups(submit.submit)).parameters
    own = dict(inspect.signature(expand_groups(estimate.estimate)).parameters)
    del own["call"], own["local"]
    others = {name: parameter for name, parameter in taken.items() if name not in OF_A_JOB}
    assert own.pop("model_id") != others.pop("model_id"), "a folder is a model as well"
    assert own == others

    sent = []
    send = httpx2.Client.stream

    def spy(self, **request):
        sent.append(request["json"])
        return send(self, **request)

    monkeypatch.setattr(httpx2.Client, "stream", spy)
    options = (
        "--ratio 0.2 --calibration local/mine.jsonl --samples 3 --sequence-length 64 --seed 1 --objective whitened "
        "--preset best --method rocket --budget bytes --include embeddings --ignore *.q_proj --export dense "
        "--dtype float32 --precision float64 --evaluate builtin --evaluate-samples 2 --evaluate-length 32 "
        "--evaluate-stride 16 --task arc_easy --task-items 9 --accept-kl 0.1"
    )
    for command in ("submit", "estimate"):
        assert remote(command, "local/tiny", *options.split()).code == 0
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("local/tiney", "--ratio", "0.3"), 3, "did you mean local/tiny?"),
        (("local/tiny", "--ratio", "0.3", "--calibration", "wikitxt2"), 2, "did you mean wikitext2?"),
        (("local/tiny", "--ratio", "0.99"), 4, "0.99"),
        (("local/tiny",), 2, "specify exactly one"),
        (("local/tiny", "--ratio", "0.3", "--hub-token-env", "NONE"), 2, "no such environment variable"),
    ],
)
def test_it_is_refused_like_a_submission(remote, arguments, code, said):
    asked, submitted = (remote(command, *arguments) for command in ("estimate", "submit"))

    assert asked.code == submitted.code == code
    assert said in " ".join(asked.err.replace("│", " ").split())
    assert asked.err.replace("estimate", "submit").replace("{MODEL}", "[MODEL_ID]") == submitted.err


@pytest.fixture
def alone(rocket, monkeypatch, tmp_path):
    """Run the command where no server answers, next to the folder `tiny`."""
    monkeypatch.setenv("ROCKET_SERVER", "http://127.0.0.1:9")
    monkeypatch.setattr("rocket_cli.connection.COMMAND_PATIENCE", 0.1)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY_LLAMA, tmp_path / "tiny")
    return rocket


def test_a_folder_is_estimated_without_a_server(alone, remote, client, monkeypatch):
    options = ("--ratio", "0.3", "--samples", "8", "--ignore", "*.q_proj", "--evaluate", "builtin", "--json")
    outcome = alone("estimate", "tiny", *options)
    assert (outcome.code, outcome.err) == (0, "")
    # The server's own estimate of the same model.
    monkeypatch.setenv("ROCKET_SERVER", client.server)
    here, there = json.loads(outcome.out), json.loads(remote("estimate", "local/tiny", *options).out)
    assert set(here.pop("available")) == set(there.pop("available"))
    assert (here.pop("model_id"), there.pop("model_id")) == ("tiny", "local/tiny")
    assert here == there


def test_it_shows_the_command_that_runs_on_this_machine(alone):
    options = ("--ratio", "0.3", "--server", "http://x", "--hub-token-env=PATH", "--local", "--ignore", "a b*")
    # The pattern matches nothing, which is said before.
    assert "matches no layer" in alone("estimate", "tiny", *options).err
    assert alone("estimate", *options[:-2], "tiny", "--seed", "1").err == (
        "rocket: to run it: rocket compress --ratio 0.3 tiny OUT --seed 1\n"
    )


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("tiny", "--ratio", "0.99"), 4, "0.99"),
        (("tiny", "--ratio", "0.3", "--calibration", "wikitxt2"), 3, "Did you mean 'wikitext2'"),
        (("tiny", "--ratio", "0.3", "--calibration", "synthetic"), 3, "reads text"),
        (("tiny", "--ratio", "0.3", "--prompt", "word " * 300), 2, "prompt 1 has"),
        (("tiny", "--ratio", "0.3", "--include", "vision"), 2, "has no tower"),
        (("tiny", "--ratio", "0.3", "--revision", "main"), 3, "has no revision"),
        (("folder/tinny", "--ratio", "0.3"), 3, "did you mean folder/tiny?"),
        (("folder/tinny", "--ratio", "0.3", "--revision", "main"), 75, "does not answer"),
        (("a/b", "--ratio", "0.3"), 75, "with --local, a repository is estimated on this machine"),
        (("local/tiny", "--ratio", "0.3"), 75, "does not answer"),
    ],
)
def test_refusals_and_advice_without_a_server(alone, tmp_path, options, code, said):
    (tmp_path / "folder").mkdir()
    shutil.copytree(tmp_path / "tiny", tmp_path / "folder" / "tiny")
    outcome = alone("estimate", *options)
    assert outcome.code == code, outcome.err
    assert said in outcome.err
    assert ("--local" in outcome.err) == (code == 75 and options[0] != "local/tiny")
