import inspect
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from rocket_cli.resuming import resume_command
from rocket_core.config import (
    WORK_FOLDER_NAME,
    AcceptanceConfig,
    CalibrationConfig,
    CompressionConfig,
    EvaluationConfig,
)
from rocket_core.engines import ExportKind
from rocket_core.errors import (
    CompressionCancelledError,
    HubUnavailableError,
    InfeasibleBudgetError,
    InsufficientDiskError,
    ModelNotFoundError,
)
from rocket_core.report.schema import CompressionReport
from tests.rocket_cli.fakes import REGRESSED, FakePipeline, FakeProgress


def test_defaults_match_the_library(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    assert rocket("compress", "some/model", tmp_path, "--ratio", "0.3").code == 0

    (call,) = pipeline.calls
    assert call["model"] == "some/model"
    assert call["output"] == tmp_path
    assert call["config"] == CompressionConfig(ratio=0.3)
    assert call["revision"] is None
    assert call["resume"] is False


def test_a_format_reaches_the_library(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    assert rocket("compress", "model", tmp_path, "--method", "rtn", "--code-bits", "8", "--group-size", "0").code == 0

    (call,) = pipeline.calls
    assert call["config"] == CompressionConfig(method="rtn", code_bits=8, group_size=0)


@pytest.mark.parametrize(("what", "included"), [("embeddings", ("embeddings",)), ("none", ())])
def test_what_to_include_reaches_the_library(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path, what: str, included: tuple[str, ...]
) -> None:
    assert rocket("compress", "model", tmp_path, "--size", "1MB", "--include", what).code == 0

    (call,) = pipeline.calls
    assert call["config"] == CompressionConfig.model_validate({"target_bytes": 10**6, "include": included})


def test_every_option_reaches_the_library(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("story.txt", "held.txt"):
        (tmp_path / name).touch()
    options = (
        "--ratio 0.45 --calibration story.txt --samples 7 --sequence-length 33 --seed 5 --device cuda:1 "
        "--dtype bfloat16 --precision float64 --objective whitened --ignore *.k_proj --ignore *.v_proj --revision v2 "
        "--resume --export dense --json --evaluate held.txt --evaluate-samples 3 --evaluate-length 40 "
        "--evaluate-stride 20 --task arc_easy --task mine.jsonl --task-items 9 --accept-kl 0.05 "
        "--accept-perplexity-increase 2% --accept-task-drop 0.01"
    )

    assert rocket("compress", "model", tmp_path, *options.split()).code == 0

    (call,) = pipeline.calls
    assert call["config"] == CompressionConfig(
        ratio=0.45,
        calibration=CalibrationConfig(dataset="story.txt", samples=7, sequence_length=33, seed=5),
        evaluate=EvaluationConfig(
            dataset="held.txt",
            samples=3,
            sequence_length=40,
            stride=20,
            tasks=("arc_easy", "mine.jsonl"),
            task_items=9,
        ),
        accept=AcceptanceConfig(max_kl=0.05, max_perplexity_increase=0.02, max_task_drop=0.01),
        device="cuda:1",
        dtype="bfloat16",
        precision="float64",
        objective="whitened",
        ignore=("*.k_proj", "*.v_proj"),
        export=("dense",),
    )
    assert (call["revision"], call["resume"]) == ("v2", True)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [(["--task", "piqa"], {"tasks": ("piqa",)}), (["--evaluate-samples", "2"], {"samples": 2})],
)
def test_any_evaluation_option_requests_an_evaluation(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path, arguments: list[str], settings: dict
) -> None:
    assert rocket("compress", "model", tmp_path, "--ratio", "0.3", *arguments).code == 0

    (call,) = pipeline.calls
    assert call["config"].evaluate == EvaluationConfig(**settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--accept-kl 0.1", "--accept-kl: is about what --evaluate measures; add it, such as --evaluate builtin"),
        ("--accept-task-drop 1%", "--accept-task-drop: is about what --evaluate measures"),
        ("--accept-task-drop 1% --evaluate builtin", "--accept-task-drop: is about tasks; add --task NAME"),
        ("--accept-kl 0 --evaluate builtin", "accept.max_kl: Input should be greater than 0"),
        ("--accept-kl=-1 --evaluate builtin", "accept.max_kl: Input should be greater than 0"),
        ("--accept-perplexity-increase two --evaluate builtin", "'two' is not a valid number; use for example"),
        ("--accept-perplexity-increase 2 --evaluate builtin", "for 2 %, write 0.02"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path, options: str, said: str
) -> None:
    outcome = rocket("compress", "model", tmp_path, "--ratio", "0.3", *options.split())

    assert outcome.code == 2
    assert said in " ".join(outcome.err.replace("│", " ").split())
    assert pipeline.calls == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_is_not_accepted_sets_the_exit_code(
    rocket: Callable, pipeline: FakePipeline, report: CompressionReport, tmp_path: Path, as_json: bool
) -> None:
    pipeline.answer = report.model_copy(update={"verdict": REGRESSED})
    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.3", *["--json"] * as_json)

    assert outcome.code == 10
    if as_json:
        assert CompressionReport.model_validate_json(outcome.out) == pipeline.answer
    else:
        assert "Verdict: regressed: KL divergence 0.5 nats per token, at most 0.05 accepted\n" in outcome.out
        assert "from_pretrained" in outcome.out, "the result is kept"

    pipeline.answer = report.model_copy(update={"verdict": REGRESSED.model_copy(update={"outcome": "accepted"})})
    assert rocket("compress", "some/model", tmp_path, "--ratio", "0.3").code == 0


def test_several_exports_can_be_specified(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    rocket("compress", "model", tmp_path, "--ratio", "0.3", "--export", "dense", "--export", "rocket")

    assert pipeline.calls[0]["config"].export == ("dense", "rocket")


def test_the_earlier_name_of_an_export_is_accepted(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    rocket("compress", "model", tmp_path, "--ratio", "0.3", "--export", "factored")

    assert pipeline.calls[0]["config"].export == ("rocket",)


def test_an_unknown_export_is_refused_with_all_names(rocket: Callable, tmp_path: Path) -> None:
    outcome = rocket("compress", "model", tmp_path, "--ratio", "0.3", "--export", "gguff")

    assert outcome.code == 2
    assert all(kind in outcome.err for kind in get_args(ExportKind))


def test_the_call_and_work_folder_match_the_real_pipeline(
    rocket: Callable, pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocket("compress", "model", "out", "--ratio", "0.3")
    (call,) = pipeline.calls
    monkeypatch.undo()
    from rocket_core.pipeline import compress

    positional = [call.pop(name) for name in ("model", "output", "config")]
    inspect.signature(compress).bind(*positional, **call)


def test_result_is_a_table_and_a_snippet_that_loads_it(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path
) -> None:
    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.3")

    assert outcome.code == 0
    assert "attn.q_proj" in outcome.out
    assert "import rocket_core.hf" in outcome.out
    assert f'from_pretrained("{tmp_path / "rocket"}")' in outcome.out


def test_json_output_is_only_the_report(
    rocket: Callable, pipeline: FakePipeline, report: CompressionReport, tmp_path: Path
) -> None:
    pipeline.progress = (FakeProgress("calibrating", "layer", 0.5, 3.0),)

    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.3", "--json")

    assert CompressionReport.model_validate_json(outcome.out) == report
    assert outcome.err == "", "stderr is no terminal here"


def test_progress_goes_to_stderr_only(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    pipeline.progress = (
        FakeProgress("preflight", None, 0.0, None),
        FakeProgress("calibrating", "model.layers.0.q_proj", 0.25, 90.0),
        FakeProgress("calibrating", "model.layers.1.q_proj", 0.26, 80.0),
    )

    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.3")

    assert outcome.err.splitlines() == [
        "rocket: 0%: checking the model",
        "rocket: 25%, 1:30 left: profiling the layers, model.layers.0.q_proj",
    ]
    assert "rocket:" not in outcome.out


def test_error_is_one_line_and_its_exit_code(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    pipeline.answer = ModelNotFoundError("no model there; look elsewhere")

    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.3")

    assert outcome.code == 3
    assert outcome.err == "rocket: error: no model there; look elsewhere\n"
    assert outcome.out == ""


def test_error_is_json_for_programs(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    pipeline.answer = InfeasibleBudgetError("at most 0.7", nearest_ratio=0.7)

    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.9", "--json")

    assert outcome.code == 4
    assert json.loads(outcome.out) == {"error": {"code": "infeasible_budget", "message": "at most 0.7"}}
    assert outcome.err == "rocket: error: at most 0.7\n"


@pytest.mark.parametrize("ratio", ["1", "-0.1", "nan"])
def test_an_out_of_range_ratio_is_refused_before_work_starts(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path, ratio: str
) -> None:
    outcome = rocket("compress", "some/model", tmp_path, f"--ratio={ratio}")

    assert outcome.code == 2
    assert "ratio" in outcome.err
    assert pipeline.calls == []


def test_a_bug_keeps_its_traceback(pipeline: FakePipeline, rocket: Callable, tmp_path: Path) -> None:
    pipeline.answer = ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        rocket("compress", "some/model", tmp_path, "--ratio", "0.3")


@pytest.mark.parametrize(
    "error", [CompressionCancelledError("stopped"), HubUnavailableError("later"), InsufficientDiskError("full")]
)
def test_a_resumable_run_shows_the_resume_command(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path, error: BaseException
) -> None:
    output = tmp_path / "my models"
    (output / WORK_FOLDER_NAME).mkdir(parents=True)
    pipeline.answer = error

    outcome = rocket("compress", "some/model", output, "--ratio", "0.3", "--ignore", "*.k_proj")

    assert f"    rocket compress --resume some/model '{output}' --ratio 0.3 --ignore '*.k_proj'\n" in outcome.err


def test_a_run_without_progress_shows_no_resume_command(
    rocket: Callable, pipeline: FakePipeline, tmp_path: Path
) -> None:
    pipeline.answer = HubUnavailableError("later")

    outcome = rocket("compress", "some/model", tmp_path, "--ratio", "0.3")

    assert outcome.code == 75
    assert "--resume" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compress", "a b", "out", "--ratio", "0.3"], ["compress", "--resume", "a b", "out", "--ratio", "0.3"]),
        (["compress", "--ratio=.3", "--", "-m", "o"], ["compress", "--resume", "--ratio=.3", "--", "-m", "o"]),
        (["compress", "m", "o", "--resume"], ["compress", "m", "o", "--resume"]),
    ],
)
def test_resume_command_survives_a_shell(arguments: list[str], expected: list[str]) -> None:
    assert shlex.split(resume_command(arguments)) == ["rocket", *expected]


def test_profiles_are_cached_only_on_request(rocket: Callable, pipeline: FakePipeline, tmp_path: Path) -> None:
    rocket("compress", "some/model", tmp_path / "out", "--ratio", "0.25")
    rocket("compress", "some/model", tmp_path / "out", "--ratio", "0.25", "--profiles", tmp_path / "kept")

    assert [call["profiles"] for call in pipeline.calls] == [None, ("kept in", tmp_path / "kept")]
