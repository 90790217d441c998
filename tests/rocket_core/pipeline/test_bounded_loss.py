"""A bound on the measured loss instead of a size: sizes are tried until the smallest that is within it is found."""

import shutil

import pytest

from rocket_core.calibration.datasets import held_out_text
from rocket_core.config import compression_config
from rocket_core.errors import CompressionCancelledError, InvalidConfigError, WorkFolderError
from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.stages import compress as compress_stage
from rocket_core.report.schema import CompressionReport
from tests.reference.observers import Watch
from tests.sampling import sweep

EVALUATE = {"samples": 8, "sequence_length": 32}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return ProfileCache(tmp_path_factory.mktemp("profiles"))


@pytest.fixture
def bounded(settings):
    def make(**changes):
        chosen = {"preset": "fast", "sensitivity_samples": 4, "evaluate": EVALUATE, "ratio": None} | changes
        return settings(**chosen)

    return make


@pytest.fixture(scope="module")
def found(model_folder, settings, profiles, tmp_path_factory):
    """Return the output and the report of a run that needs more than one round."""
    output = tmp_path_factory.mktemp("bounded") / "out"
    config = settings(preset="fast", sensitivity_samples=4, evaluate=EVALUATE, ratio=None, max_kl=0.0005)
    return output, compress(str(model_folder("llama")), output, config, profiles=profiles)


def test_the_measured_loss_is_within_the_bound(found):
    output, report = found
    assert 1 < len(report.rounds) <= 8
    assert report.evaluation.difference.kl_divergence <= 0.0005
    result = min((tried for tried in report.rounds if tried.measured <= 0.0005), key=lambda tried: tried.stored_bytes)
    assert report.evaluation.difference.kl_divergence == result.measured
    assert report.exports[0].stored_bytes == result.stored_bytes
    assert report.allocation.total_error == result.predicted
    assert report.settings.max_kl == 0.0005
    assert CompressionReport.model_validate_json((output / "report.json").read_bytes()) == report
    assert "Sizes that were tried" in (output / "report.html").read_text()
    assert "KL divergence of at most 0.0005 nats per token" in (output / "rocket" / "README.md").read_text()


def test_what_was_measured_can_be_measured_again(model_folder, bounded, profiles, tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(held_out_text())
    config = bounded(max_kl=0.0005, evaluate=EVALUATE | {"dataset": str(text)})
    report = compress(str(model_folder("llama")), output, config, profiles=profiles)
    quality = evaluate_text(output / "rocket", text, sequence_length=32, limit=8, against=model_folder("llama"))
    assert quality.difference.kl_divergence == pytest.approx(report.evaluation.difference.kl_divergence, rel=1e-4)


def test_layers_that_keep_their_form_are_kept(found, model_folder, bounded, profiles, tmp_path, monkeypatch):
    compressed = []
    original = compress_stage.compress_unit

    def note(method, problem, unit):
        compressed.append(unit.names)
        return original(method, problem, unit)

    monkeypatch.setattr(compress_stage, "compress_unit", note)
    report = compress(str(model_folder("llama")), tmp_path / "out", bounded(max_kl=0.0005), profiles=profiles)
    assert report.rounds == found[1].rounds
    layers = sum(layer.kind != "dense" for layer in report.layers)
    assert layers < len(compressed) < len(report.rounds) * layers


@pytest.mark.parametrize("part", sweep([0.3, 0.7], soak=[0.1, 0.5, 0.9]))
def test_cancelled_between_rounds_it_resumes_to_the_same_bytes(
    found, model_folder, bounded, profiles, tmp_path, fingerprint, part
):
    steps = []
    compress(
        str(model_folder("llama")),
        tmp_path / "whole",
        bounded(max_kl=0.0005),
        profiles=profiles,
        observer=Watch(on_progress=steps.append),
    )
    calls = iter(range(10**9))
    stop = round(part * len(steps))
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")),
            tmp_path / "out",
            bounded(max_kl=0.0005),
            profiles=profiles,
            observer=Watch(should_cancel=lambda: next(calls) == stop),
        )
    report = compress(
        str(model_folder("llama")), tmp_path / "out", bounded(max_kl=0.0005), profiles=profiles, resume=True
    )
    assert report.rounds == found[1].rounds
    assert fingerprint(tmp_path / "out") == fingerprint(found[0])


def test_progress_only_grows(model_folder, bounded, profiles, tmp_path):
    seen = []
    compress(
        str(model_folder("llama")),
        tmp_path / "out",
        bounded(max_kl=0.0005),
        profiles=profiles,
        observer=Watch(on_progress=seen.append),
    )
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    rounds = [progress.stage for progress in seen].count("allocating")
    assert rounds > 2
    assert fractions[-1] == 1.0
    last = max(index for index, progress in enumerate(seen) if progress.stage == "factorizing")
    assert fractions[last] < 1.0


@pytest.mark.parametrize(
    "changes", sweep([{"preset": "best"}, {"engine": "llama.cpp"}], soak=[{"preset": "max"}]), ids=str
)
def test_other_presets_and_engines_meet_the_bound(model_folder, bounded, tmp_path, changes):
    report = compress(str(model_folder("llama")), tmp_path / "out", bounded(max_kl=0.002, **changes))
    assert report.evaluation.difference.kl_divergence <= 0.002
    assert report.rounds


def test_the_increase_of_the_perplexity_can_be_bounded(model_folder, bounded, profiles, tmp_path):
    config = bounded(max_perplexity_increase=0.001)
    report = compress(str(model_folder("llama")), tmp_path / "out", config, profiles=profiles)
    quality = report.evaluation
    assert quality.after.perplexity <= 1.001 * quality.before.perplexity


def test_the_text_belongs_to_the_run(model_folder, bounded, profiles, tmp_path):
    """Rounds that were measured on one text say nothing about another."""

    def is_evaluating():
        return bool(seen) and seen[-1].stage == "evaluating"

    seen = []
    with pytest.raises(CompressionCancelledError):
        compress(
            str(model_folder("llama")),
            tmp_path / "out",
            bounded(max_kl=0.0005),
            profiles=profiles,
            observer=Watch(on_progress=seen.append, should_cancel=is_evaluating),
        )
    other = bounded(max_kl=0.0005, evaluate=EVALUATE | {"samples": 4})
    with pytest.raises(WorkFolderError, match="evaluate was"):
        compress(str(model_folder("llama")), tmp_path / "out", other, resume=True)
    shutil.rmtree(tmp_path / "out")


def test_text_is_that_of_the_calibration_by_default(model_folder, bounded, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {number}th of many short documents says nothing." for number in range(400)))
    config = bounded(
        max_kl=0.01, evaluate=None, calibration={"dataset": str(text), "samples": 4, "sequence_length": 16}
    )
    report = compress(str(model_folder("llama")), tmp_path / "out", config)
    assert report.evaluation.dataset == "text.txt"
    assert report.settings.evaluate is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_kl": 0.0}, "greater than 0"),
        ({"max_perplexity_increase": 2}, "for 2 %, write 0.02"),
        ({"max_kl": 0.1, "target_bytes": 10**6}, "only one of"),
        ({"max_kl": 0.1, "preset": "paper"}, "max_kl needs the objective fisher"),
        ({"max_kl": 0.1, "preset": "instant"}, "and preset instant does not: give a size, or take preset fast"),
        ({"max_kl": 0.1, "method": "svd-llm"}, "allocates nothing"),
        ({"max_kl": 0.1, "method": "gptq"}, "leave max_kl out"),
    ],
)
def test_bad_bounds_are_refused(changes, reason):
    with pytest.raises(InvalidConfigError, match=reason):
        compression_config(**changes)


def test_healing_would_change_the_loss(model_folder, bounded, tmp_path):
    with pytest.raises(InvalidConfigError, match="heal the result, or give a size"):
        compress(str(model_folder("llama")), tmp_path / "out", bounded(max_kl=0.1, heal_tokens=1000))


def test_a_model_without_predictions_has_no_such_loss(model_folder, bounded, tmp_path):
    with pytest.raises(InvalidConfigError, match="predicts no tokens, which max_kl is about; leave max_kl out"):
        compress(str(model_folder("bert")), tmp_path / "out", bounded(max_kl=0.1))
