"""What the page of a profile offers is what a job accepts, unless it leaves nothing to do."""

import json

import pytest

from app.pages.forms import read_compression
from app.pages.what_if import Question, WhatIf
from app.services.judgement import judge
from app.services.questions import Question as Judged
from rocket_core.config import compression_config
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline import ProfileCache, compress, profile_model
from tests.reference.tiny_models import save_tiny_model
from tests.sampling import sweep

pytestmark = pytest.mark.slow

KEPT = [("llama", "parameters"), ("llama", "bytes"), ("bert", "bytes")]
CASES = [(family, unit) for family in ("llama", "gpt2", "bert", "t5", "gpt_neox") for unit in ("parameters", "bytes")]


def ends(predictor):
    """Yield what the page asks at both ends of each slider, as its controls and as its numbers allow."""
    nothing = dict.fromkeys(("size", "bits", "loss", "ratio"))
    shown = WhatIf(predictor, Question(choice=None, **nothing), within_reach=True)
    for choice, slider in shown.sliders.items():
        for value in {slider.first, slider.least, slider.most}:
            numbers = nothing | {choice: value}
            yield WhatIf(predictor, Question(choice=choice, **numbers), within_reach=False)


@pytest.mark.parametrize(("family", "unit"), sweep(KEPT, soak=[case for case in CASES if case not in KEPT]))
def test_a_job_is_accepted_at_both_ends_of_each_slider(family, unit, tmp_path):
    folder = save_tiny_model(family, tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"A line {number} of some text for {family}. " * 4 for number in range(60)))
    data = {"dataset": str(text), "samples": 4, "sequence_length": 32}
    cache = ProfileCache(tmp_path / "profiles")
    settings = {"calibration": data, "sensitivity_samples": 2}
    profile = profile_model(str(folder), tmp_path / "work", compression_config(**settings, budget=unit), profiles=cache)
    predictor = profile.predictor()
    asked = list(ends(predictor))
    offered = {"ratio"} if unit == "parameters" else {"size", "bits", "ratio"}
    offered |= {"loss"} if unit == "bytes" and predictor.profile.text is not None else set()
    assert {one.choice for one in asked} == offered
    assert ("loss" in offered) == (unit == "bytes" and family not in {"bert", "t5"})
    for number, one in enumerate(asked):
        allocation = predictor.allocate(one.target)
        others = predictor.profile.bytes_beside(len(allocation.choices))
        stored = sum(candidate.stored_bytes for _, candidate in predictor.chosen(allocation))
        request = read_compression({"model_id": "local/tiny", **one.job_fields(others + stored)})
        question = Judged(
            request=request,
            folder=str(folder),
            hub=None,
            dataset="builtin",
            model_bytes=None,
            is_estimate=True,
            requires_isolation=False,
        )
        if all(candidate.kind == "dense" for _, candidate in predictor.chosen(allocation)):
            with pytest.raises(InvalidConfigError, match="nothing is to be done"):
                judge(question)
            continue
        judge(question)
        sent = json.loads(request.model_dump_json())
        target = {name: sent[name] for name in ("ratio", "target_bytes", "bits", "max_kl")}
        # The text of the calibration is too short to leave any.
        target["evaluate"] = sent["evaluate"]
        report = compress(
            str(folder), tmp_path / f"out{number}", compression_config(**settings, **target), profiles=cache
        )
        assert report.totals.stored_bytes <= (request.target_bytes or report.totals.stored_bytes)
