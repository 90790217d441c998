import json
import os
from pathlib import Path

import pytest

from rocket_core.calibration.datasets import held_out_text
from rocket_core.checkpoint import find_model
from rocket_core.config import EvaluationConfig, compression_config
from rocket_core.errors import (
    CompressionCancelledError,
    EmptyCalibrationError,
    InsufficientDiskError,
    InsufficientMemoryError,
    InvalidConfigError,
)
from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import compress, evaluate_artifact, requirements
from rocket_core.pipeline.preflight import calibration_inputs, prepare_run
from rocket_core.pipeline.stages import evaluate as evaluating
from rocket_core.pipeline.stages.evaluate import plan_evaluation
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import CompressionReport
from tests.reference.observers import Watch

STORIES = [f"Story {number}: " + " ".join(["rocket", "layer", "budget"][: 1 + number % 3]) for number in range(60)]


@pytest.fixture(scope="session")
def stories(tmp_path_factory):
    file = tmp_path_factory.mktemp("stories") / "stories.jsonl"
    file.write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    return file


@pytest.fixture(scope="session")
def evaluation(stories):
    """Return settings of a small evaluation; keywords override."""

    def make(**changes):
        text = {"dataset": str(stories), "samples": 4, "sequence_length": 32, "stride": 16}
        return text | {"prompts": ("Story",), "answer_tokens": 5} | changes

    return make


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory, model_folder, settings, evaluation):
    """Return the output folder and the report of an uninterrupted run with an evaluation."""
    output = tmp_path_factory.mktemp("evaluated") / "out"
    return output, compress(str(model_folder("llama")), output, settings(evaluate=evaluation()))


def is_evaluating(seen):
    return lambda: bool(seen) and seen[-1].stage == "evaluating"


def weights(output):
    return {file: file.stat().st_mtime_ns for file in output.rglob("*.safetensors") if "exports" in file.parts}


def test_the_report_has_the_quality_of_the_artifact(evaluated, model_folder, stories):
    output, report = evaluated
    alone = evaluate_text(
        output / "rocket",
        stories,
        against=model_folder("llama"),
        sequence_length=32,
        limit=4,
        stride=16,
    )

    told = report.evaluation
    assert (told.before, told.after, told.difference) == (alone.dense, told.after, alone.difference)
    assert told.after.perplexity == alone.perplexity > told.before.perplexity
    assert told.difference.kl_divergence > 0
    assert (told.export, told.dataset, told.windows, told.tokens) == ("rocket", "stories.jsonl", 4, 31 + 3 * 16)
    assert report.settings.evaluate.dataset == "stories.jsonl"
    assert [stage.name for stage in report.stages][-1] == "evaluating"
    assert CompressionReport.model_validate_json((output / "dense" / "report.json").read_bytes()) == report


def test_a_finished_artifact_is_evaluated_as_its_run_would(evaluated, model_folder, settings, evaluation, tmp_path):
    output, report = evaluated
    folder, seen = str(model_folder("llama")), []
    later = evaluate_artifact(
        folder, output / "rocket", tmp_path, settings(evaluate=evaluation()), observer=Watch(on_progress=seen.append)
    )
    assert later == report.evaluation
    [answer] = later.answers
    assert (answer.prompt, answer.is_chat, len(answer.before), len(answer.after)) == ("Story", False, 5, 5)
    assert list(tmp_path.iterdir()) == []
    assert list(dict.fromkeys(step.stage for step in seen)) == ["preflight", "evaluating"]
    assert seen[-1].fraction == 1


def test_an_artifact_is_not_compared_with_another_model(evaluated, model_folder, settings, evaluation, tmp_path):
    other = str(model_folder("gpt2"))
    with pytest.raises(InvalidConfigError, match="is not the model that the artifact was made from"):
        evaluate_artifact(other, evaluated[0] / "rocket", tmp_path, settings(evaluate=evaluation()))


@pytest.mark.parametrize("asked", [{"tasks": ("arc_easy",)}, {"prompts": ("Once",)}])
def test_what_a_reward_model_cannot_answer_is_refused_first(model_folder, settings, evaluation, tmp_path, asked):
    config = settings(evaluate=evaluation(**({"prompts": ()} | asked)))
    with pytest.raises(InvalidConfigError, match="predicts no tokens"):
        compress(str(model_folder("llama_reward")), tmp_path, config)
    assert list(tmp_path.iterdir()) == []


def test_a_later_evaluation_can_be_cancelled(evaluated, model_folder, settings, evaluation, tmp_path):
    folder, seen = str(model_folder("llama")), []
    with pytest.raises(CompressionCancelledError, match="measuring quality"):
        evaluate_artifact(
            folder,
            evaluated[0] / "rocket",
            tmp_path,
            settings(evaluate=evaluation()),
            observer=Watch(on_progress=seen.append, should_cancel=is_evaluating(seen)),
        )
    assert list(tmp_path.iterdir()) == []


def test_evaluation_changes_no_artifact_and_leaves_no_file(evaluated, finished, fingerprint):
    output, _ = evaluated
    assert fingerprint(output) == fingerprint(finished("llama")[0])
    assert sorted(path.name for path in output.iterdir()) == ["dense", "report.html", "report.json", "rocket"]


def test_the_model_card_shows_before_and_after(evaluated, finished):
    output, report = evaluated
    card = (output / "rocket" / "README.md").read_text()
    assert f"| perplexity | {report.evaluation.before.perplexity:.4g} |" in card
    assert f"| KL divergence, nats per token |  | {report.evaluation.difference.kl_divergence:.4f} |" in card
    assert "\n\n\n" not in card
    other = (finished("llama")[0] / "rocket" / "README.md").read_text()
    assert "Quality" not in other
    assert "\n\n\n" not in other


def test_without_a_rocket_artifact_the_dense_one_is_evaluated(tmp_path, model_folder, settings, evaluation):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(evaluate=evaluation(), export=("dense",)))
    assert report.evaluation.export == "dense"


def test_an_interrupted_evaluation_is_repeated_on_resume(tmp_path, model_folder, settings, evaluation, evaluated):
    folder, output, config = str(model_folder("llama")), tmp_path / "out", settings(evaluate=evaluation())
    seen = []
    with pytest.raises(CompressionCancelledError, match="measuring quality"):
        compress(folder, output, config, observer=Watch(on_progress=seen.append, should_cancel=is_evaluating(seen)))
    before = weights(output)
    assert len(before) == 2

    again = []
    with pytest.raises(CompressionCancelledError):
        compress(
            folder,
            output,
            config,
            resume=True,
            observer=Watch(on_progress=again.append, should_cancel=is_evaluating(again)),
        )
    assert weights(output) == before

    assert compress(folder, output, config, resume=True).evaluation == evaluated[1].evaluation


def test_an_incomplete_artifact_is_written_again(tmp_path, model_folder, settings, evaluation, evaluated, fingerprint):
    folder, output, config = str(model_folder("llama")), tmp_path / "out", settings(evaluate=evaluation())
    steps = []

    def stop():
        return sum(progress.stage == "exporting" for progress in steps) > 10

    with pytest.raises(CompressionCancelledError):
        compress(folder, output, config, observer=Watch(on_progress=steps.append, should_cancel=stop))
    compress(folder, output, config, resume=True)
    assert fingerprint(output) == fingerprint(evaluated[0])


def test_a_finished_evaluation_is_not_repeated(tmp_path, model_folder, settings, evaluation, evaluated, monkeypatch):
    folder, output, config = str(model_folder("llama")), tmp_path / "out", settings(evaluate=evaluation())
    with monkeypatch.context() as patch:

        def die(*_):
            raise KeyboardInterrupt

        patch.setattr("rocket_core.pipeline.stages.publish.write_description", die)
        with pytest.raises(KeyboardInterrupt):
            compress(folder, output, config)
    monkeypatch.setattr(evaluating, "compare_models", die)
    assert compress(folder, output, config, resume=True).evaluation == evaluated[1].evaluation


def test_another_evaluation_can_be_requested_on_resume(tmp_path, model_folder, settings, evaluation, monkeypatch):
    folder, output = str(model_folder("llama")), tmp_path / "out"
    with monkeypatch.context() as patch:

        def die(*_):
            raise KeyboardInterrupt

        patch.setattr("rocket_core.pipeline.stages.publish.write_description", die)
        with pytest.raises(KeyboardInterrupt):
            compress(folder, output, settings(evaluate=evaluation()))
    report = compress(folder, output, settings(evaluate=evaluation(samples=2)), resume=True)
    assert report.evaluation.windows == 2


def test_a_finished_run_is_not_evaluated_afterwards(evaluated, finished, model_folder, settings, evaluation):
    folder = str(model_folder("llama"))
    output, report = evaluated
    assert compress(folder, output, settings(evaluate=evaluation()), resume=True) == report
    assert compress(folder, output, settings(), resume=True) == report
    for place, wanted in ((output, evaluation(samples=3)), (finished("llama")[0], evaluation())):
        with pytest.raises(InvalidConfigError, match="rocket evaluate"):
            compress(folder, place, settings(evaluate=wanted), resume=True)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sequence_length": 65}, InvalidConfigError),
        ({"sequence_length": None, "stride": 65}, InvalidConfigError),
        ({"tasks": ("nonsense",)}, InvalidConfigError),
        ({"dataset": "nonsense"}, InvalidConfigError),
    ],
)
def test_an_impossible_evaluation_is_refused_before_any_work(
    tmp_path, model_folder, settings, evaluation, changes, error
):
    with pytest.raises(error):
        compress(str(model_folder("llama")), tmp_path / "out", settings(evaluate=evaluation(**changes)))
    assert not (tmp_path / "out").exists()


def test_a_text_used_up_by_calibration_is_refused(tmp_path, model_folder, settings, stories, evaluation):
    calibration = {"dataset": str(stories), "samples": 1000, "sequence_length": 32}
    with pytest.raises(EmptyCalibrationError, match="nothing is left to evaluate on"):
        compress(str(model_folder("llama")), tmp_path / "out", settings(calibration=calibration, evaluate=evaluation()))


@pytest.fixture
def plan(model_folder):
    """Return a run with its plan of an evaluation."""

    def make(calibration, evaluate):
        config = compression_config(ratio=0.3, calibration=calibration, evaluate=evaluate)
        run = prepare_run(find_model(str(model_folder("llama"))), config)
        return run, plan_evaluation(run)

    return make


def stories_in(run, windows):
    text = run.inputs.tokenizer.decode(windows.flatten().tolist())
    return {number for number in range(len(STORIES)) if f"Story {number}:" in text}


@pytest.mark.parametrize("other_name", [False, True])
def test_calibration_and_evaluation_documents_are_disjoint(plan, tmp_path, stories, other_name):
    link = tmp_path / "link.jsonl"
    os.link(stories, link)
    dataset = str(link if other_name else stories)
    calibration = {"dataset": str(stories), "samples": 12, "sequence_length": 32, "seed": 3}

    run, planned = plan(calibration, {"dataset": dataset, "samples": 20, "sequence_length": 32})

    calibrated = stories_in(run, calibration_inputs(run, WorkFolder(Path("nowhere"))).tensors["input_ids"])
    evaluated = stories_in(run, planned.how.text.windows)
    assert len(calibrated) > 10
    assert len(evaluated) > 10
    assert not calibrated & evaluated


def test_another_file_is_read_from_its_start(plan, stories, text):
    run, planned = plan({"dataset": str(text), "samples": 2}, {"dataset": str(stories), "sequence_length": 32})
    assert run.inputs.tokenizer.decode(planned.how.text.windows[0].tolist()).startswith("<s>Story 0: rocket<s>Story 1")


def test_builtin_text_is_independent_of_the_calibration(plan, text):
    texts = [plan({"dataset": dataset, "samples": 2}, {"sequence_length": 40}) for dataset in ("builtin", str(text))]
    assert len({planned.how.text.sha256 for _, planned in texts}) == 1
    run, planned = texts[0]
    assert run.inputs.tokenizer.decode(planned.how.text.windows[0].tolist()[1:]) == held_out_text()[:39]
    assert planned.how.text.count == EvaluationConfig().samples


def test_too_little_memory_for_the_whole_model_is_refused_early(
    tmp_path, model_folder, settings, evaluation, monkeypatch
):
    folder, config = str(model_folder("llama")), settings(evaluate=evaluation())
    run = prepare_run(find_model(folder), config)
    logits = (31 + 3 * 16) * 320 * 4
    with monkeypatch.context() as patch:
        patch.setattr(requirements, "free_disk", lambda _folder: logits - 1)
        with pytest.raises(InsufficientDiskError, match=r"evaluate\.samples"):
            requirements.check_evaluation(run, plan_evaluation(run), tmp_path)
    monkeypatch.setattr(requirements, "free_memory", lambda _device: 2**30)
    with pytest.raises(InsufficientMemoryError, match="whole model"):
        requirements.check_evaluation(run, plan_evaluation(run), tmp_path)
    requirements.check_evaluation(run, None, tmp_path)


def test_zero_shot_tasks_are_in_the_report(tmp_path, model_folder, settings, evaluation):
    pytest.importorskip("lm_eval")
    task = tmp_path / "quiz.jsonl"
    item = {"context": "a", "choices": [" b", " c"], "gold": 0}
    task.write_text("".join(json.dumps(item) + "\n" for _ in range(3)))

    report = compress(
        str(model_folder("llama")),
        tmp_path / "out",
        settings(evaluate=evaluation(tasks=(str(task),), task_items=2), export=("rocket",)),
    )

    for quality in (report.evaluation.before, report.evaluation.after):
        assert [(score.task, score.metric, score.items) for score in quality.tasks] == [
            ("quiz", "acc", 2),
            ("quiz", "acc_norm", 2),
        ]
    assert report.settings.evaluate.tasks == ("quiz.jsonl",)
    assert "| quiz, acc of 2 | " in (tmp_path / "out" / "rocket" / "README.md").read_text()
