"""Compression whose kept numbers are rounded afterwards."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  # registers the quantizer
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.block_walk import BlockWalk

FAST = {"preset": "fast", "sensitivity_samples": 4, "ratio": 0.4}
RUNS = {
    "paper": {},
    "fast": FAST,
    "sequential": {**FAST, "sequential": True},
    "wanda": {"method": "wanda"},
    "svd-llm": {"method": "svd-llm"},
}


@pytest.fixture
def made(model_folder, settings, tmp_path):
    """Compress a family; returns the output folder and the report."""

    def make(bits, family="llama", *, profiles=None, **changes):
        output = tmp_path / f"{family}-{bits}"
        config = settings(**changes, value_bits=bits)
        return output, compress(str(model_folder(family)), output, config, profiles=profiles)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_same_numbers_are_kept_in_fewer_bits(made, run):
    outputs = {bits: made(bits, **RUNS[run]) for bits in (16, 8, 4)}
    whole = outputs[16][1]
    errors = {}
    for bits, (output, report) in outputs.items():
        for layer, before in zip(report.layers, whole.layers, strict=True):
            assert (layer.kind, layer.rank, layer.kept_parameters) == (before.kind, before.rank, before.kept_parameters)
        tensors = load_file(output / "rocket" / "model.safetensors")
        for layer in report.layers:
            stored = [tensor for name, tensor in tensors.items() if name.startswith(f"{layer.name}.")]
            assert layer.stored_bytes == sum(tensor.nbytes for tensor in stored), layer.name
        errors[bits] = sum(layer.achieved_error**2 for layer in report.layers)
    assert errors[16] < errors[4]
    assert errors[8] == pytest.approx(errors[16], rel=0.05)
    sizes = [
        sum(layer.stored_bytes for layer in report.layers if layer.kind != "dense") for _, report in outputs.values()
    ]
    # The model is stored in float32; masks stay.
    assert sizes[0] > 2.5 * sizes[1] > 3.5 * sizes[2]
    table = json.loads((outputs[4][0] / "rocket" / "config.json").read_text())["quantization_config"]
    assert table["format_version"] == 3
    assert {entry["bits"] for entry in table["layers"].values()} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_both_exports_compute_the_same(made, family, bits):
    output, _ = made(bits, family, **FAST)
    tokens = torch.arange(24)[None] % 300
    with torch.no_grad():
        found = [AutoModelForCausalLM.from_pretrained(output / export)(tokens).logits for export in ("rocket", "dense")]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_profile_serves_all_bits(made, tmp_path, monkeypatch):
    cache = ProfileCache(tmp_path / "profiles")
    made(16, profiles=cache, **FAST)
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    _, report = made(4, profiles=cache, **FAST)
    assert report.settings.value_bits == 4


@pytest.mark.parametrize(
    "target", [{"ratio": 0.5, "budget": "bytes"}, {"ratio": None, "bits": 4}, {"ratio": None, "target_bytes": 10}]
)
def test_bytes_have_bits_of_their_own(settings, target):
    with pytest.raises(InvalidConfigError, match="value_bits are for budget parameters"):
        settings(**target, preset="fast", value_bits=8)
    assert settings(**target, preset="fast", value_bits=16).value_bits == 16
