"""Predictions from the profile of a whole model."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.sizes.target import ByBits
from tests.reference import choices as reference
from tests.reference.choices import ITEMSIZE, models
from tests.sampling import examples


def test_a_stored_profile_names_its_budget_unit_measure():
    dense = Candidate(kind="dense", kept_parameters=16, stored_bytes=32, reconstruction_error=0, weight_error=0)
    layer = LayerProfile(name="q", d_in=4, d_out=4, input_group="q", tokens=8, candidates=(dense,))
    profile = ModelProfile(
        fingerprint="f",
        model="m",
        revision="r",
        settings={},
        objective="whitened",
        budget_unit="bytes",
        cap_slack=0,
        itemsize=2,
        model_parameters=32,
        dense_bytes=64,
        other_bytes=0,
        layers=(layer,),
    )
    stored = profile.model_dump(mode="json")
    assert stored["measure"] == "bytes"
    assert stored == json.loads(profile.model_dump_json())
    assert "budget_unit" not in stored
    assert ModelProfile.model_validate(stored) == profile


@settings(max_examples=examples(50), deadline=None)
@given(
    models(), st.integers(1, 1600), st.sampled_from(["parameters", "bytes"]), st.sampled_from(["whitened", "fisher"])
)
def test_bits_give_the_best_layers_within_them(layers, hundredths, budget_unit, objective):
    predictor = ModelProfile(
        fingerprint="f",
        model="m",
        revision="r",
        settings={},
        objective=objective,
        budget_unit=budget_unit,
        cap_slack=0,
        itemsize=ITEMSIZE,
        model_parameters=1000,
        dense_bytes=2000,
        other_bytes=300,
        layers=layers,
    ).predictor()
    parameters = sum(layer.d_in * layer.d_out for layer in layers)
    best = reference.least_error(layers, parameters * hundredths // 800, "bytes", objective)
    target = ByBits(bits=hundredths / 100)
    if best is None:
        with pytest.raises(InfeasibleBudgetError, match="bits per weight are out of reach"):
            predictor.allocate(target)
        return
    allocation = predictor.allocate(target)
    stored = sum(candidate.stored_bytes for _, candidate in predictor.chosen(allocation))
    assert 800 * stored <= hundredths * parameters
    assert allocation.total_error == pytest.approx(best, abs=1e-12)
    assert allocation.budget_unit == "bytes"
