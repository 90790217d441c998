"""A model's selected bytes, before a run and in its report."""

import json

import pytest

from rocket_core.checkpoint import find_model, open_checkpoint
from rocket_core.estimates.coverage import coverage_of_headers
from rocket_core.pipeline import compress
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.run_coverage import coverage_of_run
from tests.reference.observers import Watch
from tests.reference.sequence_models import save_sequence_model
from tests.reference.tiny_mixtures import save_tiny_mixture
from tests.reference.tiny_models import save_tiny_model
from tests.reference.tiny_speech import save_tiny_speech
from tests.reference.tiny_vision import save_tiny_vision

SAVE = {
    "qwen3_vl": save_tiny_vision,
    "llava": save_tiny_vision,
    "mixtral": save_tiny_mixture,
    "llama": save_tiny_model,
    "t5": save_tiny_model,
    "bart": save_sequence_model,
    "qwen2_audio": save_tiny_speech,
}
SETTINGS = [
    {},
    {"ratio": None, "target_bytes": 10**6},
    {"ignore": ("*.mlp.*", "*.experts.*")},
    {"preset": "fast", "budget": "bytes", "include": ("embeddings",)},
]


@pytest.mark.parametrize("family", SAVE)
def test_headers_and_run_agree(family, tmp_path, settings):
    folder = tmp_path / family
    SAVE[family](family, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = open_checkpoint(folder).weights
    for changes in SETTINGS:
        ignore = [pattern for pattern in changes.get("ignore", ()) if ("experts" in pattern) == (family == "mixtral")]
        if ignore and family in ("t5", "bart"):
            ignore = ["encoder.*"] if family == "t5" else ["model.encoder.*"]
        how = settings(**(changes | {"ignore": ignore}))
        found = coverage_of_run(prepare_run(find_model(str(folder)), how))
        told = coverage_of_headers(config, weights, how)
        assert told.model_bytes == found.model_bytes
        # Headers do not tell a router from a layer.
        assert told.selected_bytes == pytest.approx(found.selected_bytes, rel=0.05)
        assert [part.how for part in told.more] == [part.how for part in found.more]
        for one, other in zip(told.more, found.more, strict=True):
            assert one.bytes == pytest.approx(other.bytes, rel=0.02)


def test_a_run_warns_before_it_starts_and_reports_it(model_folder, settings, tmp_path):
    told = []
    config = settings(ignore=("*.mlp.*",), export=("rocket",))
    report = compress(str(model_folder("llama")), tmp_path / "out", config, observer=Watch(on_warning=told.append))
    assert told == [report.coverage.warning]
    assert "fewer ignored layers (" in told[0]
    assert report.coverage.warning in (tmp_path / "out" / "report.html").read_text().replace("&#39;", "'")
    layers = sum(layer.d_in * layer.d_out for layer in report.layers)
    assert report.coverage.selected_bytes == 4 * layers


def test_without_a_reason_there_is_no_warning(finished):
    _, report = finished("llama")
    assert report.coverage.fraction > 0.5
    assert report.coverage.warning is None
