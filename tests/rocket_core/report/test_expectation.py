"""Predicted losses as perplexities, and texts that a model does not know."""

import json
import math
from pathlib import Path

import pytest

from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.report.expectation import NOISE, expectation
from rocket_core.report.headlines import quality_headline
from tests.reference.reports import report_of_layers

RUNS = sorted((Path(__file__).parents[3] / "docs" / "quality").glob("*/predictions.json"))


def text(surprise=0.1, perplexity=10.0):
    likelihood = math.log(perplexity)
    return CalibratedText(tokens=100, negative_log_likelihood=likelihood, entropy=likelihood - surprise)


def test_nine_of_ten_measured_increases_are_in_the_range():
    rows = [row for file in RUNS for row in json.loads(file.read_text())]
    assert len(RUNS) == 3
    assert len(rows) >= 47
    inside = []
    for row in rows:
        low, high = expectation(row["predicted"], text(row["surprise"]), sequential=row["preset"] == "best").bounds
        inside.append(low <= row["measured"] <= high)
    assert sum(inside) >= 0.9 * len(rows), [row for row, found in zip(rows, inside, strict=True) if not found]


def test_an_expected_perplexity_has_a_range():
    expected = expectation(0.1, text())
    increase = 0.9 * 0.1 * 1.33
    assert expected.value == f"10 → {10 * math.exp(increase):.4g}"
    low, high = increase / 1.5 - NOISE, 1.5 * increase + NOISE
    assert expected.range_text == f"{10 * math.exp(low):.4g} to {10 * math.exp(high):.4g}"
    assert expected.range_text in expected.explanation
    assert "not measured" in expected.explanation


def test_what_is_compressed_in_order_loses_less():
    assert expectation(0.1, None, sequential=True).increase < expectation(0.1, None).increase


def test_other_text_loses_more_than_one_known_by_heart():
    usual, known = expectation(0.1, text(0.1)), expectation(0.1, text(-0.2))
    assert known.value == usual.value
    assert known.bounds[1] > 3 * usual.bounds[1] > 0
    assert "learnt this text by heart" in known.explanation


def test_without_the_original_perplexity_it_is_a_percentage():
    expected = expectation(0.01, None)
    assert expected.value == "0.93 % higher"
    assert expected.range_text.endswith("% higher")


def test_an_absurd_prediction_does_not_overflow():
    assert "e+" in expectation(1e6, text()).value


@pytest.mark.parametrize(
    ("surprise", "foreign"), [(-0.2, False), (0.5, False), (0.99, False), (1.01, True), (2.1, True)]
)
def test_a_text_is_foreign_if_the_model_expects_to_know_it(surprise, foreign):
    found = text(surprise, perplexity=100.0)
    assert found.is_foreign is foreign
    assert (found.warning is not None) is foreign
    if foreign:
        assert "its perplexity is 100, where the model itself expects" in found.warning


def test_the_headline_is_a_perplexity_where_tokens_are_predicted():
    report = report_of_layers()
    allocation = report.allocation.model_copy(update={"objective": "fisher", "total_error": 0.1})
    read = report.calibration.model_copy(update={"text": text()})
    assert quality_headline(report).value == "0.1"
    found = quality_headline(report.model_copy(update={"allocation": allocation, "calibration": read}))
    assert found.value == expectation(0.1, text()).value
    other = report.model_copy(update={"calibration": read})
    assert other.allocation.objective == "weight"
    assert quality_headline(other).value == "0.1", "a relative error is no perplexity"
