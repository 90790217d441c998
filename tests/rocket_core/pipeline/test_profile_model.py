"""Profiling alone: the work before any ratio, stored for later."""

import pytest

from rocket_core.errors import CompressionCancelledError, InvalidConfigError
from rocket_core.pipeline import ProfileCache, compress, profile_model
from rocket_core.pipeline.block_walk import BlockWalk
from tests.reference.observers import Watch

FAST = {"preset": "fast", "sensitivity_samples": 4, "export": ("rocket",), "cap_slack": 0.01}


@pytest.fixture
def profile_cache(tmp_path):
    return ProfileCache(tmp_path / "profiles")


@pytest.fixture
def profile(tmp_path, model_folder, settings, profile_cache):
    def run(*, resume=False, **functions):
        config = settings(**FAST, ratio=None)
        how = {"profiles": profile_cache, "resume": resume, "observer": Watch(**functions)}
        return profile_model(str(model_folder("llama")), tmp_path / "work", config, **how)

    return run


def test_a_compression_matches_its_profile_without_calibration(
    profile, tmp_path, model_folder, settings, profile_cache, fingerprint, monkeypatch
):
    predicted = profile().predictor().at_ratio(0.4)
    compress(str(model_folder("llama")), tmp_path / "alone", settings(**FAST, ratio=0.4))
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(**FAST, ratio=0.4), profiles=profile_cache)
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "alone")
    assert report.allocation.total_error == predicted.total_error
    assert report.allocation.kept == predicted.kept


def test_only_the_profile_is_left(profile, tmp_path):
    told, layers, costs = [], [], []
    model = profile(
        on_progress=told.append,
        on_profile=lambda place, layer: layers.append((place, layer)),
        on_costs=costs.append,
    )
    [stages] = costs
    assert [stage.name for stage in stages] == ["preflight", "differentiating", "calibrating"]
    assert all(stage.peak_memory_bytes > 0 and stage.device for stage in stages)
    assert not list((tmp_path / "work").iterdir())
    assert [layer for _, layer in layers] == list(model.layers)
    assert [place for place, _ in layers] == list(range(len(model.layers)))
    fractions = [progress.fraction for progress in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert {progress.stage for progress in told} == {"preflight", "differentiating", "calibrating"}
    # The bar does not jump at the end.
    assert fractions[-2] > 0.8


def test_a_cancelled_profile_resumes_where_it_stopped(profile, profile_cache, model_folder, settings, tmp_path):
    layers = []
    with pytest.raises(CompressionCancelledError):
        profile(on_profile=lambda _place, layer: layers.append(layer), should_cancel=lambda: len(layers) > 3)
    assert not profile_cache.folder.exists()
    with pytest.raises(InvalidConfigError, match="resume"):
        profile()
    again = []
    model = profile(resume=True, on_profile=lambda _place, layer: again.append(layer))
    assert list(model.layers)[: len(layers)] == layers
    assert again == list(model.layers)


def test_a_target_is_refused(tmp_path, model_folder, settings, profile_cache):
    with pytest.raises(InvalidConfigError, match="leave the target out"):
        profile_model(str(model_folder("llama")), tmp_path / "work", settings(**FAST), profiles=profile_cache)
