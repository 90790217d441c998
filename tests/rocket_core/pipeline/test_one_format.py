"""Compression by the methods that store every layer in one format."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  # registers the quantizer
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline import ProfileCache, compress, profile_model
from tests.sampling import sweep


@pytest.fixture(params=["rtn", "gptq"])
def one_format(request, settings):
    """Return settings of a method that stores one format."""

    return partial(settings, method=request.param, ratio=None)


@pytest.mark.parametrize(
    ("family", "sequential"),
    sweep(
        [("llama", True), ("gpt2", False)],
        soak=[("llama", False), ("gpt2", True), ("bert", False), ("bert", True)],
    ),
)
def test_every_layer_has_the_format_and_the_artifact_loads(family, sequential, model_folder, one_format, tmp_path):
    chosen = one_format(code_bits=3, group_size=32, sequential=sequential)
    report = compress(str(model_folder(family)), tmp_path / "out", chosen)
    for layer in report.layers:
        assert (layer.kind, layer.bits, layer.scale_bits) == ("quantized", 3, 16)
        assert layer.group_size == min(32, layer.d_in)
        groups = -(-layer.d_in // 32)
        assert layer.stored_bytes == 3 * layer.d_in * layer.d_out // 8 + 2 * groups * layer.d_out
    assert report.totals.achieved_ratio == 0
    stored = sum(layer.stored_bytes for layer in report.layers)
    assert report.allocation.kept == report.allocation.budget == stored
    files = load_file(tmp_path / "out" / "rocket" / "model.safetensors")
    assert sum(name.endswith(".weight_scale") for name in files) == len(report.layers)


def test_both_exports_compute_the_same(model_folder, one_format, tmp_path):
    compress(str(model_folder("llama")), tmp_path / "out", one_format(code_bits=4))
    tokens = torch.arange(24)[None] % 300
    factored, dense = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / export) for export in ("rocket", "dense")
    )
    with torch.no_grad():
        torch.testing.assert_close(factored(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)


def test_ignored_layers_stay_dense(model_folder, one_format, tmp_path):
    report = compress(str(model_folder("llama")), tmp_path / "out", one_format(ignore=("*.down_proj",)))
    assert {layer.kind for layer in report.layers} == {"quantized"}
    assert not any(layer.name.endswith("down_proj") for layer in report.layers)


def test_a_method_of_one_format_has_no_profile(model_folder, one_format, tmp_path):
    with pytest.raises(InvalidConfigError, match="needs no profile"):
        profile_model(
            str(model_folder("llama")), tmp_path / "out", one_format(), profiles=ProfileCache(tmp_path / "profiles")
        )
