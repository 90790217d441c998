"""The verdict on a measured result: which bounds hold, and what does not look like a compression's loss."""

import json
import math
from datetime import date
from pathlib import Path

import pytest

from rocket_core.config import AcceptanceConfig
from rocket_core.report.answers import AnswerToken, ComparedAnswer
from rocket_core.report.loading import MOST_DIVERGENCE, LoadingReport
from rocket_core.report.quality import Difference, EvaluationReport, ModelQuality, TaskScore
from rocket_core.report.verdict import Verdict, judge

RUNS = sorted((Path(__file__).parents[3] / "docs" / "quality").glob("*/predictions.json"))
LOOP = ["the", " same", " words", " again"] * 16
TEXT = [f" word{number}" for number in range(64)]
PLENTY = AcceptanceConfig(max_kl=100)


def quality(loss, **right):
    scores = [TaskScore(task=task, metric="acc", value=value, items=100) for task, value in right.items()]
    return ModelQuality(negative_log_likelihood=loss, perplexity=None, tasks=tuple(scores))


def measured(before=2.0, after=2.0, kl=0.01, answers=()):
    one, other = (each if isinstance(each, ModelQuality) else quality(each) for each in (before, after))
    return EvaluationReport(
        export="rocket",
        dataset="builtin",
        windows=1,
        sequence_length=8,
        stride=8,
        tokens=7,
        text_sha256="0" * 64,
        before=one,
        after=other,
        difference=Difference(kl_divergence=kl, top1_agreement=0.9),
        answers=tuple(answers),
    )


def answered(before, after):
    tokens = tuple(AnswerToken(text=text, before=0.5, after=0.5, kl_divergence=0.0) for text in before)
    return ComparedAnswer(prompt="Hi", is_chat=False, before=tokens, after=tuple(after), first_difference=None)


@pytest.mark.parametrize(
    ("bounds", "evaluation", "outcome", "found"),
    [
        ({"max_kl": 0.05}, measured(kl=0.05), "accepted", 0.05),
        ({"max_kl": 0.05}, measured(kl=0.0501), "regressed", 0.0501),
        # exp(2.04) is 4.08 % more than exp(2).
        ({"max_perplexity_increase": 0.041}, measured(after=2.04), "accepted", 0.040810774),
        ({"max_perplexity_increase": 0.04}, measured(after=2.04), "regressed", 0.040810774),
        ({"max_perplexity_increase": 0.01}, measured(after=1.9), "accepted", -0.095162582),
        ({"max_task_drop": 0.1}, measured(quality(2, a=0.5, b=0.8), quality(2, a=0.41, b=0.9)), "accepted", 0.09),
        # The drop is 0.010000000000000009.
        ({"max_task_drop": 0.01}, measured(quality(2, a=0.73), quality(2, a=0.72)), "accepted", 0.01),
        ({"max_task_drop": 0.01}, measured(quality(2, a=0.73), quality(2, a=0.71)), "regressed", 0.02),
        ({"max_task_drop": 0.05}, measured(quality(2, a=0.5, b=0.8), quality(2, a=0.41, b=0.9)), "regressed", 0.09),
    ],
)
def test_a_result_is_accepted_up_to_its_bounds(bounds, evaluation, outcome, found):
    verdict = judge(AcceptanceConfig(**bounds), evaluation, None)
    assert verdict.outcome == outcome
    (bound,) = verdict.bounds
    assert (bound.name, bound.bound) == next(iter(bounds.items()))
    assert bound.measured == pytest.approx(found, abs=1e-9)
    assert len(verdict.reasons) == (outcome == "regressed")
    assert verdict.is_accepted == (outcome == "accepted")


def test_each_bound_that_does_not_hold_is_a_reason():
    bounds = AcceptanceConfig(max_kl=0.001, max_perplexity_increase=0.02, max_task_drop=0.01)
    verdict = judge(bounds, measured(quality(2, quiz=0.5), quality(2.01, quiz=0.25), kl=0.0123), None)
    assert verdict.reasons == (
        "KL divergence 0.0123 nats per token, at most 0.001 accepted",
        "drop in quiz, acc 25 %, at most 1 % accepted",
    )
    assert verdict.text == f"regressed: {verdict.reasons[0]}; {verdict.reasons[1]}"
    assert [bound.holds for bound in verdict.bounds] == [False, True, False]
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_an_accepted_verdict_has_its_numbers():
    verdict = judge(AcceptanceConfig(max_kl=0.05, max_perplexity_increase=0.5), measured(after=2.01), 0.01)
    assert verdict.text == (
        "accepted: KL divergence 0.01 nats per token, at most 0.05 accepted; "
        "perplexity increase 1.005 %, at most 50 % accepted"
    )


def test_a_perplexity_beyond_a_float_is_a_regression():
    verdict = judge(AcceptanceConfig(max_perplexity_increase=0.5), measured(after=5000.0), None)
    assert verdict.outcome == "regressed"
    assert math.isfinite(Verdict.model_validate_json(verdict.model_dump_json()).bounds[0].measured)


@pytest.mark.parametrize(
    ("predicted", "after", "outcome"),
    [
        (0.01, 2.101, "accepted"),
        (0.01, 2.102, "anomalous"),
        (0.0, 2.001, "accepted"),
        (0.0, 2.002, "anomalous"),
        (0.1, 1.0, "accepted"),
        (None, 9.0, "accepted"),
    ],
)
def test_a_loss_far_above_the_predicted_one_is_anomalous(predicted, after, outcome):
    verdict = judge(PLENTY, measured(after=after), predicted)
    assert verdict.outcome == outcome
    if outcome == "anomalous":
        assert f"{after - 2:.3g} nats per token higher, where {predicted:.3g} was predicted" in verdict.text


def test_no_documented_measurement_is_anomalous():
    rows = [row for file in RUNS for row in json.loads(file.read_text())]
    assert len(rows) >= 16
    for row in rows:
        evaluation = measured(after=2 + row["measured"], kl=row["kl_divergence"])
        assert judge(PLENTY, evaluation, row["predicted"]).is_accepted, row


def test_an_anomaly_outweighs_a_bound_and_names_both():
    verdict = judge(AcceptanceConfig(max_kl=0.1), measured(after=4, kl=1.5), 0.01)
    assert verdict.outcome == "anomalous"
    assert ["predicted" in reason for reason in verdict.reasons] == [True, False]
    assert "KL divergence 1.5" in verdict.reasons[1]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (TEXT, ["", " ", "\n"], "the answer to prompt 2 is empty, and the original's is not"),
        (TEXT, LOOP, "the answer to prompt 2 repeats itself, and the original's does not"),
        (TEXT, [*TEXT[:30], *["!"] * 34], "the answer to prompt 2 repeats itself, and the original's does not"),
        (LOOP, ["a", " b"] * 32, None),
        ([""], ["", ""], None),
        (TEXT, [*TEXT[:50], *LOOP[:14]], None),
        (TEXT, [" ha"] * 15, None),
        (TEXT, TEXT, None),
    ],
)
def test_spoilt_answers_are_anomalous(before, after, said):
    verdict = judge(PLENTY, measured(answers=[answered(TEXT, TEXT), answered(before, after)]), None)
    assert verdict.reasons == (() if said is None else (said,))
    assert verdict.outcome == ("accepted" if said is None else "anomalous")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"fault": "does not read it"}, "llama.cpp did not run it: does not read it"),
        (
            {"kl_divergence": 1.01 * MOST_DIVERGENCE, "splits_alike": True},
            "llama.cpp computes something else than the weights say: KL divergence 0.1 from its weights in "
            "transformers",
        ),
        (
            {"kl_divergence": 0.001, "splits_alike": False},
            "llama.cpp splits text into other tokens than the original's tokenizer",
        ),
        ({"kl_divergence": MOST_DIVERGENCE, "splits_alike": True}, None),
        ({"untried": "it is too large"}, None),
    ],
)
def test_what_an_engine_does_not_run_is_anomalous(found, reason):
    loading = LoadingReport(engine="llama.cpp", version="one 1", date=date(2026, 1, 2), **found)
    verdict = judge(PLENTY, measured(), None, [loading])
    assert verdict.reasons == (() if reason is None else (reason,))
    assert verdict.outcome == ("accepted" if reason is None else "anomalous")
    if reason is not None:
        assert loading.summary == f"{reason}; tried with llama.cpp (one 1) on 2026-01-02"
