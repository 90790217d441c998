"""Predicted losses as perplexities, and texts that a model does not know."""

import json
import math
from pathlib import Path

import pytest

from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.report.expectation import MEASURED_OF_PREDICTED, NOISE, expectation
from rocket_core.report.headlines import quality_headline
from tests.reference.reports import report_of_layers

RUNS = sorted((Path(__file__).parents[3] / "docs" / "quality").glob("*/predictions.json"))


def text(surprise=0.1, perplexity=10.0):
    likelihood = math.log(perplexity)
    return CalibratedText(tokens=100, negative_log_likelihood=likelihood, entropy=likelihood - surprise)


def test_the_range_is_that_of_all_measured_predictions():
    rows = [row for file in RUNS for row in json.loads(file.read_text())]
    assert len(RUNS) == 2
    assert len(rows) >= 16
    for row in rows:
        low, high = expectation(row["predicted"], None).bounds
        assert low <= row["measured"] <= high, row
    ratios = [row["measured"] / row["predicted"] for row in rows if row["predicted"] > NOISE]
    assert (math.floor(10 * min(ratios)) / 10, math.ceil(max(ratios))) == MEASURED_OF_PREDICTED


def test_an_expected_perplexity_has_a_range():
    expected = expectation(0.1, text())
    assert expected.value == "10 → 11.05"
    low, high = (
        10 * math.exp(0.1 * times + error) for times, error in zip(MEASURED_OF_PREDICTED, (-NOISE, NOISE), strict=True)
    )
    assert expected.range_text == f"{low:.4g} to {high:.4g}"
    assert expected.range_text in expected.explanation
    assert "not measured" in expected.explanation


def test_without_the_original_perplexity_it_is_a_percentage():
    expected = expectation(0.01, None)
    assert expected.value == "1 % higher"
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
    assert found.value == "10 → 11.05"
    other = report.model_copy(update={"calibration": read})
    assert other.allocation.objective == "weight"
    assert quality_headline(other).value == "0.1", "a relative error is no perplexity"
