"""Compression from the weights alone: preset `instant`."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import rocket_core.hf  # noqa: F401  # registers the quantizer
from rocket_core.calibration import datasets
from rocket_core.config import compression_config
from rocket_core.errors import CompressionCancelledError, InfeasibleBudgetError
from rocket_core.pipeline import ProfileCache, compress, preflight, profile_model, run
from tests.reference.observers import Watch
from tests.sampling import sweep

SAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"


def instant(**settings):
    return compression_config(preset="instant", **settings)


def held_out():
    tokens = AutoTokenizer.from_pretrained(SAMPLE)((SAMPLE / "heldout.txt").read_text()).input_ids
    return torch.tensor(tokens[: 32 * 128]).view(-1, 128)


def divergence(folder):
    """Return the KL divergence of a model from the sample model, in nats per token."""
    dense, other = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (SAMPLE, folder))
    with torch.no_grad():
        before, after = (model(held_out()).logits.log_softmax(-1) for model in (dense, other))
    return float((before.exp() * (before - after)).sum(-1).mean())


@pytest.fixture
def no_forward(monkeypatch):
    """Make every forward pass, and every reading of calibration data, an error."""

    def refuse(*_args, **_keywords):
        raise AssertionError("nothing is run or read")

    for module in (nn.Linear, nn.Embedding):
        monkeypatch.setattr(module, "forward", refuse)
    monkeypatch.setattr(datasets, "documents", refuse)
    monkeypatch.setattr(preflight, "open_source", refuse)
    # What an engine makes of the finished file is compared with a forward pass.
    monkeypatch.setattr(run, "run_export", lambda *_arguments: None)


def test_a_size_is_filled_without_a_forward_pass(no_forward, tmp_path):
    report = compress(str(SAMPLE), tmp_path / "out", instant(target_bytes=1_500_000))
    stored = sum(file.stat().st_size for file in (tmp_path / "out" / "rocket").glob("*.safetensors"))
    assert 0.99 * 1_500_000 <= stored <= 1_500_000
    assert {layer.kind for layer in report.layers} <= {"quantized", "entropy_coded"}
    assert "model.embed_tokens" in report.tables
    assert (report.calibration.samples, report.calibration.dataset) == (0, "none")
    assert report.calibration_reach is None
    assert "differentiating" not in {stage.name for stage in report.stages}
    assert "not calibrated" in (tmp_path / "out" / "rocket" / "README.md").read_text()


def test_at_equal_bytes_it_beats_rounding_to_nearest(tmp_path):
    rtn = compression_config(method="rtn", code_bits=4, group_size=32, calibration={"samples": 1})
    plain = compress(str(SAMPLE), tmp_path / "rtn", rtn)
    size = plain.exports[0].stored_bytes
    report = compress(str(SAMPLE), tmp_path / "out", instant(bits=4.5))
    assert report.exports[0].stored_bytes <= size
    assert divergence(tmp_path / "out" / "rocket") <= 0.7 * divergence(tmp_path / "rtn" / "rocket")


@pytest.mark.parametrize(
    "family", sweep(["gpt2", "vit"], soak=["llama", "bert", "t5", "whisper", "phi3", "gpt_neox", "distilbert"])
)
def test_every_kind_of_model_is_compressed(model_folder, no_forward, monkeypatch, family, tmp_path):
    report = compress(str(model_folder(family)), tmp_path / "out", instant(bits=6))
    assert report.bits_per_weight <= 6
    assert all(layer.kind == "dense" or layer.error < 0.3 for layer in report.layers)
    monkeypatch.undo()
    loaded = AutoModel.from_pretrained(tmp_path / "out" / "rocket")
    assert all(bool(parameter.isfinite().all()) for parameter in loaded.parameters())


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "mlx"])
def test_files_of_other_engines_are_made(no_forward, engine, tmp_path):
    report = compress(str(SAMPLE), tmp_path / "out", instant(bits=5.2, dtype="bfloat16", engine=engine))
    assert 4.5 <= report.bits_per_weight <= 5.2
    for block in range(6):
        stored = {layer.name.rpartition(".")[2]: layer for layer in report.layers if f".{block}." in layer.name}
        for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            formats = {(stored[name].bits, stored[name].group_size) for name in fused}
            assert engine != "vllm" or len(formats) == 1


def test_a_stopped_run_resumes_to_the_same_bytes(model_folder, tmp_path):
    model, config = str(model_folder("llama")), instant(bits=5)
    compress(model, tmp_path / "whole", config)
    asked = iter(range(40))

    with pytest.raises(CompressionCancelledError):
        compress(model, tmp_path / "parts", config, observer=Watch(should_cancel=lambda: next(asked, None) is None))
    compress(model, tmp_path / "parts", config, resume=True)
    name = Path("rocket", "model.safetensors")
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_profile_answers_any_size(model_folder, tmp_path):
    model, profiles = str(model_folder("llama")), ProfileCache(tmp_path / "profiles")
    predictor = profile_model(model, tmp_path / "profile", instant(), profiles=profiles).predictor()
    assert 0.6 < predictor.reachable_ratio < 1
    errors = [predictor.at_ratio(ratio).total_error for ratio in (0.6, 0.7, 0.8)]
    assert errors == sorted(errors)
    cached = compress(model, tmp_path / "cached", instant(ratio=0.75), profiles=profiles)
    alone = compress(model, tmp_path / "alone", instant(ratio=0.75))
    assert cached.layers == alone.layers
    assert alone.allocation.total_error == predictor.at_ratio(0.75).total_error


def test_a_size_out_of_reach_names_the_least(model_folder, tmp_path):
    with pytest.raises(InfeasibleBudgetError) as refusal:
        compress(str(model_folder("llama")), tmp_path / "out", instant(ratio=0.99))
    assert 0.8 < refusal.value.nearest_ratio < 0.99
