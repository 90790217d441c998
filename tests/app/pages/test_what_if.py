"""What a profile's page predicts for a size, for bits per weight, for a loss and for a ratio."""

import html
import json
import re

import pytest

from app.pages.what_if import Slider
from rocket_core.report.calibrated_text import CalibratedText
from tests.app.api.conftest import BODY

TEXT = CalibratedText(tokens=100, negative_log_likelihood=3.0, entropy=3.0)


def with_losses(layer):
    """Return the candidates of a layer, with losses that are as large as their errors."""
    return tuple(
        candidate.model_copy(update={"loss": candidate.reconstruction_error}) for candidate in layer.candidates
    )


@pytest.fixture
def profile_of(client, worker):
    """Return the id of a profile whose budget counts the given unit."""

    def make(unit, objective="fisher", text=TEXT):
        changes = {"budget_unit": unit, "objective": objective, "text": text}
        for name in ("layers", "tables"):
            layers = getattr(worker.model_profile, name)
            changes[name] = tuple(layer.model_copy(update={"candidates": with_losses(layer)}) for layer in layers)
        worker.model_profile = worker.model_profile.model_copy(update=changes)
        options = {"budget": unit, "preset": "fast"}
        job_id = client.post("/jobs", json=BODY | {"options": options}).json()["id"]
        return worker.profile_model(job_id)

    return make


@pytest.fixture
def what_if(page, profile_of):
    """Return the text of a profile's page for a query, and of the part that changes with it."""
    made = profile_of("bytes")

    def show(query, part="/what-if"):
        answer = page("GET", f"/ui/profiles/{made}{part}?{query}")
        assert answer.status_code == 200, answer.text
        return html.unescape(answer.text)

    show.id = made
    return show


def link(text):
    return re.search(r'class="button primary" href="/ui/new\?([^"]+)">([^<]+)<', text).groups()


def number(page_text, choice, attribute):
    return float(re.search(rf'id="{choice}" name="{choice}"[^>]* {attribute}="([^"]+)"', page_text)[1])


def test_a_profile_of_bytes_offers_every_target(what_if):
    text = what_if("", "")
    assert re.findall(r'id="target-(\w+)"[^>]*?( checked)?>', text) == [
        ("size", " checked"),
        ("bits", ""),
        ("loss", ""),
        ("ratio", ""),
    ]
    for choice in ("size", "bits", "loss", "ratio"):
        assert number(text, choice, "min") <= number(text, choice, "value") <= number(text, choice, "max")


@pytest.mark.parametrize(
    ("least", "step", "first"),
    [(1.17, 0.05, 1.2), (1.2, 0.05, 1.2), (0, 0.01, 0), (183.4, 1.0, 184), (15.99, 0.05, 16)],
)
def test_sliders_begin_at_a_round_number_within_reach(least, step, first):
    assert Slider(choice="bits", least=least, most=max(16, first), step=step, value=16).first == first


@pytest.mark.parametrize("changes", [{"objective": "whitened"}, {"text": None}])
def test_losses_are_offered_where_tokens_are_predicted(page, profile_of, changes):
    text = page("GET", f"/ui/profiles/{profile_of('bytes', **changes)}?target=loss&loss=0.1").text
    assert "target-loss" not in text
    assert re.search(r'id="target-size"[^>]* checked', text)


def test_a_profile_of_parameters_offers_ratios_only(page, profile_of):
    text = page("GET", f"/ui/profiles/{profile_of('parameters')}?target=size&size=1").text
    assert "target-size" not in text
    assert "profile the model for a size" in text
    assert number(text, "ratio", "value") == 0.3


@pytest.mark.parametrize(
    ("choice", "unit"), [("size", " kB"), ("bits", " bits per weight"), ("loss", " nats per token")]
)
def test_the_prediction_is_that_of_the_api(what_if, client, choice, unit):
    text = what_if("", "")
    value = round((number(text, choice, "min") + number(text, choice, "max")) / 2, 2)
    member = {"size": "model_bytes", "loss": "error"}.get(choice, choice)
    asked = {member: round(value * 1000) if choice == "size" else value}
    expected = client.post(f"/profiles/{what_if.id}/allocations", json=asked).json()
    part = what_if(f"target={choice}&{choice}={value}")
    assert f"{expected['error']:.3g}" in part
    query, label = link(part)
    assert label.endswith(f"{value:.10g}{unit}")
    assert (f"size={round(value * 1000)}" if choice == "size" else f"{choice}={value:.10g}") in query
    rows = json.loads(what_if(f"target={choice}&{choice}={value}", "/figures/allocation-map.json"))["rows"]
    assert [row["kind"] for row in rows] == [layer["chosen"]["kind"] for layer in expected["layers"]]


def test_the_ends_of_every_slider_are_reachable(what_if):
    text = what_if("", "")
    for choice in ("size", "bits", "loss", "ratio"):
        for end in ("min", "max"):
            part = what_if(f"target={choice}&{choice}={number(text, choice, end)}")
            assert "headlines" in part, (choice, end)


def test_a_value_out_of_reach_is_refused_or_the_nearest_shown(what_if):
    part = what_if("target=bits&bits=0.01")
    assert "0.01 bits per weight are out of reach" in part
    text = what_if("target=bits&bits=0.01", "")
    assert number(text, "bits", "value") == number(text, "bits", "min")
    assert "headlines" in text


@pytest.mark.parametrize("query", ["target=weight", "bits=17", "size=nan", "size=inf", "ratio=1", "bits=x"])
def test_invalid_values_are_refused(page, what_if, query):
    assert page("GET", f"/ui/profiles/{what_if.id}/what-if?{query}").status_code == 422


def test_a_ratio_of_bytes_becomes_a_size_of_the_new_job(what_if):
    query, label = link(what_if("target=ratio&ratio=0.2"))
    assert label == "Compress at 0.2"
    assert "target=size" in query
