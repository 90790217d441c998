"""Compression whose quantized layers may have some formats only."""

import pytest

from rocket_core.pipeline import compress
from rocket_core.pipeline.block_walk import BlockWalk

BYTES = {"ratio": None, "preset": "fast", "sensitivity_samples": 4}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "tables", "bits"), [({"bits": 6}, 0, {4, 8}), ({"target_bytes": 60_000}, 2, {8})])
def test_quantized_layers_have_the_formats_asked_for(model_folder, settings, tmp_path, target, tables, bits):
    config = settings(**BYTES, **target, code_bits=(4, 8), group_size=(32, 128), kinds=("quantized", "entropy_coded"))
    report = compress(str(model_folder("llama")), tmp_path / "out", config)
    assert len(report.tables) == tables
    quantized = [layer for layer in report.layers if layer.kind != "dense"]
    assert {layer.kind for layer in quantized} == {"quantized"}
    assert {layer.bits for layer in quantized} == bits
    for layer in quantized:
        assert layer.group_size in {min(32, layer.d_in), min(128, layer.d_in)}
        assert layer.scale_bits == 8


def test_factors_of_codes_need_no_second_calibration(tmp_path, model_folder, settings, monkeypatch):
    calls = []
    statistics = BlockWalk.statistics
    monkeypatch.setattr(BlockWalk, "statistics", lambda *given, **more: calls.append(1) or statistics(*given, **more))
    config = settings(preset="fast", ratio=0.93, budget="bytes", kinds=("low_rank", "quantized"), objective="whitened")
    report = compress(str(model_folder("llama")), tmp_path / "out", config)
    assert any(layer.rank is not None and layer.bits is not None for layer in report.layers)
    assert len(calls) == 2, "one for each block"
