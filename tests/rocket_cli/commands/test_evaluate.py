import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rocket_core.evaluation import EvaluationResult
from rocket_core.report.quality import Difference
from tests.reference.encoders import save_bert
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a text. " * 20)
    return path


def test_result_is_json(rocket: Callable, model: Path, text: Path) -> None:
    outcome = rocket(
        "evaluate", model, "--text", text, "--sequence-length", "16", "--limit", "3", "--device", "cpu", "--json"
    )

    assert outcome.code == 0
    result = EvaluationResult.model_validate_json(outcome.out)
    assert (result.model, result.text) == (str(model), str(text))
    assert (result.sequence_length, result.windows, result.tokens) == (16, 3, 45)
    assert result.perplexity > 1
    assert result.file_bytes == (model / "model.safetensors").stat().st_size
    assert (result.against_bytes, outcome.err) == (None, "")


def test_json_is_quiet_without_a_terminal(rocket: Callable, model: Path, text: Path) -> None:
    outcome = rocket("evaluate", model, "--text", text, "--sequence-length", "16", "--json")

    assert json.loads(outcome.out)["windows"] == 701 // 16
    assert outcome.err == ""


def test_model_is_named_as_typed(rocket: Callable, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)

    outcome = rocket("evaluate", model.name, "--text", text, "--sequence-length", "16", "--limit", "1", "--json")

    assert json.loads(outcome.out)["model"] == model.name


def test_against_the_original_it_measures_both_models(
    rocket: Callable, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    windows = ("--sequence-length", "16", "--limit", "3", "--stride", "8")

    outcome = rocket("evaluate", model.name, "--text", text, *windows, "--against", model.name, "--json")

    assert outcome.code == 0
    result = EvaluationResult.model_validate_json(outcome.out)
    assert (result.model, result.against, result.stride) == (model.name, model.name, 8)
    assert (result.windows, result.tokens) == (3, 15 + 2 * 8)
    assert result.dense is not None
    assert result.dense.perplexity == result.perplexity
    assert result.difference == Difference(kl_divergence=0, top1_agreement=1)
    assert result.against_bytes == result.file_bytes


def test_models_are_shown_side_by_side(
    rocket: Callable, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)

    outcome = rocket("evaluate", model.name, "--text", text, "--limit", "1", "--against", model.name)
    alone = rocket("evaluate", model.name, "--text", text, "--limit", "1")

    assert (outcome.code, alone.code) == (0, 0)
    names, file, perplexity, divergence, likeliest = (line.split() for line in outcome.out.splitlines())
    assert names == ["63", "tokens", "of", str(text), model.name, model.name]
    assert file[0] == "file"
    assert file[1:3] == file[3:]
    assert perplexity[0] == "perplexity"
    assert perplexity[1] == perplexity[2]
    assert divergence == ["KL", "divergence,", "nats", "per", "token", "0.0000"]
    assert likeliest == ["same", "likeliest", "token", "100.0%"]
    assert "measuring quality, dense, 1 of 1 windows" in outcome.err
    assert "Loading weights" not in outcome.err
    assert [line.split()[0] for line in alone.out.splitlines()] == ["63", "file", "perplexity"]


def test_an_encoder_is_measured_only_against_its_original(rocket: Callable, text: Path, tmp_path: Path) -> None:
    encoder = save_bert(tmp_path / "bert")

    alone = rocket("evaluate", encoder, "--text", text)
    outcome = rocket("evaluate", encoder, "--text", text, "--against", encoder, "--json")
    table = rocket("evaluate", encoder, "--text", text, "--against", encoder)

    assert "cosine drift" in table.out
    assert (alone.code, outcome.code) == (2, 0)
    assert "encoder" in alone.err
    result = EvaluationResult.model_validate_json(outcome.out)
    assert result.difference == Difference(cosine_drift=0)
    assert (result.perplexity, result.windows) == (None, 1)


def test_tasks_are_scored(rocket: Callable, model: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    task = tmp_path / "quiz.jsonl"
    task.write_text(json.dumps({"context": "a", "choices": [" b", " c"], "gold": 0}) + "\n")

    outcome = rocket("evaluate", model, "--text", text, "--limit", "1", "--task", task, "--task-items", "1", "--json")

    scores = EvaluationResult.model_validate_json(outcome.out).tasks
    assert [(score.task, score.metric, score.items) for score in scores] == [
        ("quiz", "acc", 1),
        ("quiz", "acc_norm", 1),
    ]
    assert outcome.err == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["--text", "missing.txt"], 3, "unknown_dataset"),
        (["--text", "text.pdf"], 2, "invalid_config"),
        (["--sequence-length", "1000"], 2, "invalid_config"),
        (["--limit", "0"], 2, "invalid_config"),
        (["--device", "abacus"], 2, "invalid_config"),
        (["--stride", "0"], 2, "invalid_config"),
        (["--task", "nonsense"], 2, "invalid_config"),
        (["--task-items", "0"], 2, "invalid_config"),
        (["--against", "no:where"], 3, "model_not_found"),
    ],
)
def test_error_is_one_line_and_json_for_programs(
    rocket: Callable, model: Path, text: Path, arguments: list[str], exit_code: int, code: str
) -> None:
    outcome = rocket("evaluate", model, "--text", text, *arguments, "--json")

    assert outcome.code == exit_code
    error = json.loads(outcome.out)["error"]
    assert error["code"] == code
    assert outcome.err == f"rocket: error: {error['message']}\n"


def test_folder_without_a_model_is_an_error(rocket: Callable, tmp_path: Path, text: Path) -> None:
    outcome = rocket("evaluate", tmp_path, "--text", text)

    assert outcome.code == 3
    assert "config.json" in outcome.err
    assert outcome.out == ""
