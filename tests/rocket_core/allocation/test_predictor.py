"""Predictions from the profile of a whole model."""

import json

from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile


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
