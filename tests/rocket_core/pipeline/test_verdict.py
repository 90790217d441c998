"""The verdict of a run: in its report, of the bounds that the run has, and no part of its identity."""

import pytest

from rocket_core.checkpoint import find_model
from rocket_core.config import healing_config
from rocket_core.errors import CompressionCancelledError, InvalidConfigError
from rocket_core.hub.requests import check_request
from rocket_core.pipeline import compress, heal
from rocket_core.pipeline.preflight import prepare_run, run_identity
from rocket_core.report.schema import CompressionReport
from tests.reference.observers import Watch

EVALUATE = {"samples": 2, "sequence_length": 32}


@pytest.fixture(scope="module")
def judged(model_folder, settings, tmp_path_factory):
    """Return the output folder and the report of a run with bounds, of which one does not hold."""
    output = tmp_path_factory.mktemp("judged") / "out"
    config = settings(evaluate=EVALUATE, accept={"max_kl": 1e-9, "max_perplexity_increase": 0.9})
    return output, compress(str(model_folder("llama")), output, config)


def test_a_run_ends_with_a_verdict_on_what_it_measured(judged, finished, fingerprint):
    output, report = judged
    measured = report.evaluation
    increase = measured.after.perplexity / measured.before.perplexity - 1
    divergence, perplexity = report.verdict.bounds
    assert (divergence.bound, divergence.measured) == (1e-9, measured.difference.kl_divergence)
    assert (perplexity.bound, perplexity.measured) == (0.9, pytest.approx(increase))
    assert report.verdict.outcome == "regressed"
    assert CompressionReport.model_validate_json((output / "report.json").read_text()) == report
    assert "Verdict: regressed" in (output / "report.html").read_text()
    assert fingerprint(output) == fingerprint(finished("llama")[0]), "the artifacts are kept, and the same"


def test_a_healed_artifact_has_no_verdict_of_before(judged, model_folder, tmp_path):
    config = healing_config(tokens=512, sequence_length=16, device="cpu")
    heal(judged[0], tmp_path, config, model=str(model_folder("llama")))
    healed = CompressionReport.model_validate_json((tmp_path / "rocket" / "report.json").read_text())
    assert healed.healing is not None
    assert (healed.evaluation, healed.verdict) == (None, None)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"preset": "fast"}, "anomalous"),
        # No profile predicts what rounding costs, and nothing predicts a loss for the paper's objective.
        ({"preset": "fast", "value_bits": 4}, "accepted"),
        ({}, "accepted"),
    ],
)
def test_the_predicted_loss_is_judged_where_there_is_one(
    model_folder, settings, tmp_path, monkeypatch, changes, outcome
):
    monkeypatch.setattr("rocket_core.report.verdict.FAR_FROM_PREDICTED", -1e9)
    config = settings(evaluate=EVALUATE, accept={"max_kl": 100}, **changes)
    assert compress(str(model_folder("llama")), tmp_path / "out", config).verdict.outcome == outcome


def test_bounds_are_no_part_of_a_runs_identity(model_folder, settings, tmp_path):
    source, bounds = find_model(str(model_folder("llama"))), {"evaluate": EVALUATE, "accept": {"max_kl": 0.1}}
    plain, judged = (run_identity(prepare_run(source, settings(**given))) for given in ({}, bounds))
    assert judged == plain
    seen = []

    def is_exporting():
        return bool(seen) and seen[-1].stage == "exporting"

    watch = Watch(on_progress=seen.append, should_cancel=is_exporting)
    with pytest.raises(CompressionCancelledError):
        compress(str(model_folder("llama")), tmp_path / "out", settings(**bounds), observer=watch)
    other = settings(evaluate=EVALUATE, accept={"max_kl": 50})
    report = compress(str(model_folder("llama")), tmp_path / "out", other, resume=True)
    assert (report.verdict.outcome, report.verdict.bounds[0].bound) == ("accepted", 50)


def test_a_finished_run_has_no_other_verdict(model_folder, settings, tmp_path):
    model, output = str(model_folder("llama")), tmp_path / "out"
    config = settings(evaluate=EVALUATE, accept={"max_kl": 50})
    report = compress(model, output, config)
    assert compress(model, output, config, resume=True) == report
    with pytest.raises(InvalidConfigError, match="its verdict is about other bounds"):
        compress(model, output, settings(evaluate=EVALUATE, accept={"max_kl": 1}), resume=True)


def test_a_model_that_predicts_no_tokens_has_no_verdict(model_folder, settings, tmp_path):
    model, config = str(model_folder("llama_reward")), settings(evaluate=EVALUATE, accept={"max_kl": 1})
    for act in (lambda: check_request(model, config), lambda: compress(model, tmp_path, config)):
        with pytest.raises(InvalidConfigError, match=r"predicts no tokens, .* leave accept out"):
            act()
    assert list(tmp_path.iterdir()) == []
