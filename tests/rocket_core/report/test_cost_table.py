"""The cost of a compression compared with the paper's."""

import pytest

from rocket_core.report.cost_table import cost_comparison, how_measured
from rocket_core.report.html import render_report
from rocket_core.report.schema import StageEnergy, StageReport
from tests.reference.reports import report_of_layers


def stage(name, seconds, kwh=None, *, counted=False, accelerator=None):
    energy = None
    if kwh is not None:
        energy = StageEnergy(processor_kwh=kwh, memory_kwh=0.0, accelerator_kwh=accelerator, processor_counted=counted)
    return StageReport(name=name, seconds=seconds, peak_memory_bytes=10**8, device="Some CPU, 4 threads", energy=energy)


def report_of(*stages, parameters=2 * 10**9):
    report = report_of_layers()
    totals = report.totals.model_copy(update={"model_parameters": parameters})
    return report.model_copy(update={"stages": stages, "totals": totals})


def test_figures_of_the_paper_are_shown_with_its_ratios():
    _, rocket, cospadi = cost_comparison(report_of(stage("calibrating", 1.0))).rows
    assert cospadi["energy_kwh"] / rocket["energy_kwh"] > 100
    assert int(cospadi["seconds"] / rocket["seconds"]) == 96
    assert rocket["energy_per_billion"] == pytest.approx(0.0765 / 1.2358144)


def test_costs_are_given_per_billion_parameters():
    own = cost_comparison(report_of(stage("calibrating", 60.0, 0.004), stage("exporting", 40.0, 0.001))).rows[0]
    assert own["energy_kwh"] == pytest.approx(0.005)
    assert own["energy_per_billion"] == pytest.approx(0.0025)
    assert own["seconds_per_billion"] == pytest.approx(50.0)
    assert own["device"] == "Some CPU, 4 threads"


def test_a_small_model_is_not_scaled_up():
    figure = cost_comparison(report_of(stage("calibrating", 60.0, 0.004), parameters=10**7))
    own, rocket, _ = figure.rows
    assert (own["energy_kwh"], own["energy_per_billion"], own["seconds_per_billion"]) == (0.004, None, None)
    assert rocket["energy_per_billion"] is not None
    assert "not scaled up" in figure.note


def test_unmeasured_energy_is_not_shown_as_zero():
    report = report_of(stage("calibrating", 60.0, 0.004), stage("exporting", 40.0))
    own = cost_comparison(report).rows[0]
    assert (own["energy_kwh"], own["energy_per_billion"]) == (None, None)
    assert how_measured(report) == "The energy was not measured."


def test_it_distinguishes_counted_and_estimated_energy():
    estimated = how_measured(report_of(stage("calibrating", 1.0, 0.1)))
    assert "the processor's estimated" in estimated
    assert "accelerator" not in estimated
    counted = how_measured(report_of(stage("calibrating", 1.0, 0.1, counted=True, accelerator=0.2)))
    assert "the processor's by its own counters" in counted
    assert "the accelerator's by its driver" in counted


def test_the_page_shows_energy_by_stage_and_in_total():
    text = render_report(report_of(stage("calibrating", 60.0, 0.004), stage("exporting", 40.0, 0.001)))
    assert "and about 5 Wh" in text
    assert '<td class="number">4 Wh</td>' in text
    assert '<td class="number">7.88 kWh</td>' in text
    assert "of the accelerator" not in text
