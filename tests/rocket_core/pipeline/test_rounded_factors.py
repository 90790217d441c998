"""Compression to so few bits per weight that layers become low-rank factors made of codes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  # registers the quantizer
from rocket_core.pipeline import compress
from rocket_core.pipeline.stages import artifact_size

BITS = 1.9
KINDS = ("low_rank", "quantized")


@pytest.fixture(scope="module")
def made(tmp_path_factory, model_folder, settings):
    """Compress to less than any format of codes has; returns the output folder and the report."""

    def make(**changes):
        output = tmp_path_factory.mktemp("rounded") / "out"
        usual = {"preset": "fast", "kinds": KINDS, "storage": "memory", "sensitivity_samples": 4}
        config = settings(ratio=None, bits=BITS, **usual, **changes)
        return output, compress(str(model_folder("llama")), output, config)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [False, True])
def test_factors_of_codes_are_stored_and_load(made, sequential):
    output, report = made(sequential=sequential)
    factored = {layer.name for layer in report.layers if layer.kind == "low_rank" and layer.bits == 3}
    assert factored
    files = load_file(output / "rocket" / "model.safetensors")
    for layer in report.layers:
        stored = {name: tensor for name, tensor in files.items() if name.startswith(f"{layer.name}.")}
        assert layer.stored_bytes == sum(tensor.nbytes for tensor in stored.values())
        assert (f"{layer.name}.weight_u_scale" in stored) == (layer.name in factored)
    bits = 8 * sum(layer.stored_bytes for layer in report.layers)
    assert bits <= BITS * sum(layer.d_in * layer.d_out for layer in report.layers)
    table = json.loads((output / "rocket" / "config.json").read_text())["quantization_config"]
    assert table["format_version"] == 3
    assert {name for name, entry in table["layers"].items() if "rank" in entry} == factored
    tokens = torch.arange(24)[None] % 300
    with torch.no_grad():
        found = [AutoModelForCausalLM.from_pretrained(output / export)(tokens).logits for export in ("rocket", "dense")]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_bytes_of_the_file_are_known_beforehand(made, monkeypatch):
    expected = []

    def record(run, allocation, selected):
        expected.append(artifact_size.artifact_bytes(run, selected))
        return artifact_size.unallocated_bytes(run, allocation, selected)

    monkeypatch.setattr("rocket_core.pipeline.chosen_layers.unallocated_bytes", record)
    output, report = made()
    assert any(layer.kind == "low_rank" and layer.bits == 3 for layer in report.layers)
    assert expected == [(output / "rocket" / "model.safetensors").stat().st_size]
