"""Healing in reports: the curve, the headline, the page."""

import pytest
from pydantic import ValidationError

from rocket_core.report.figures import loss_curve
from rocket_core.report.headlines import quality_headline
from rocket_core.report.healing import HealingPoint, HealingReport
from rocket_core.report.html import render_report
from tests.reference.reports import report_of_layers

CURVE = (
    HealingPoint(step=0, tokens=0, held_out=0.5),
    HealingPoint(step=2, tokens=4096, training=0.25),
    HealingPoint(step=2, tokens=4096, held_out=0.125),
)


@pytest.fixture
def report():
    healing = HealingReport(
        dataset="stories.txt",
        seed=0,
        sequence_length=64,
        windows=64,
        held_out_windows=7,
        tokens=4096,
        steps=2,
        learning_rate=0.01,
        trained_values=100,
        divergence_before=0.5,
        divergence_after=0.125,
        kept_step=2,
        text_sha256="0" * 64,
        curve=CURVE,
    )
    return report_of_layers().model_copy(update={"healing": healing})


def test_the_figure_has_every_point():
    assert loss_curve(CURVE).rows == tuple(point.model_dump() for point in CURVE)


def test_points_have_one_order_and_one_line():
    mixed = (CURVE[2], CURVE[0], CURVE[1])
    assert tuple(sorted(mixed, key=lambda point: point.order)) == CURVE
    assert CURVE[1].text == "4,096 tokens, training divergence 0.2500"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_divergence_is_a_finite_number(value):
    with pytest.raises(ValidationError):
        HealingPoint(step=0, tokens=0, training=value)


def test_the_quality_is_what_healing_measured(report):
    headline = quality_headline(report)
    assert headline.value == "0.5 → 0.125"
    assert "7 held-out windows of stories.txt" in headline.detail


def test_the_page_draws_the_curve(report):
    page = render_report(report)
    assert 'data-figure="loss-curve"' in page
    assert "0.5000 before, 0.1250 after. The values after step 2 were kept." in page
    assert 'data-figure="loss-curve"' not in render_report(report_of_layers())
