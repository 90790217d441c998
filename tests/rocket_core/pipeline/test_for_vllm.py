"""Models for vLLM: files of compressed-tensors, read here by stock transformers."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.block_walk import BlockWalk
from tests.reference.observers import Watch
from tests.reference.tiny_models import VOCAB_SIZE, save_tiny_model

pytest.importorskip("compressed_tensors")
TOKENS = torch.arange(40)[None] % VOCAB_SIZE
# What vLLM fuses in models like Llama, see `packed_modules_mapping` in its `models/llama.py`.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a checkpoint whose layers have groups of 32 and 64 inputs."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    save_tiny_model("llama", folder)
    config = LlamaConfig(**{**json.loads((folder / "config.json").read_text()), "hidden_size": 128, "head_dim": 32})
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory, settings, llama):
    def run(profiles=None, **changes):
        output = tmp_path_factory.mktemp("out")
        chosen = {"ratio": None, "preset": "fast", "sensitivity_samples": 4, "engine": "vllm"} | changes
        return output, compress(str(llama), output, settings(**chosen), profiles=profiles)

    return run


@pytest.fixture(scope="module")
def mixed(make):
    return make(bits=6.1, export=("compressed-tensors", "dense"), evaluate={"samples": 4, "sequence_length": 32})


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_transformers_computes_what_our_reconstruction_does(mixed):
    output, report = mixed
    assert {layer.bits for layer in report.layers} == {4, 8}
    loaded = AutoModelForCausalLM.from_pretrained(output / "compressed-tensors", dtype="auto")
    dense = AutoModelForCausalLM.from_pretrained(output / "dense", dtype="auto")
    assert torch.equal(logits(loaded), logits(dense))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_dequantizing_mixed_bits_at_once_fails_loudly(mixed):
    # transformers takes the bits of the first group for all layers. With compressed-tensors before 0.19 it notices by
    # the shapes of weights.
    output, _ = mixed
    with pytest.raises(RuntimeError, match=r"conversion of the weights|ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(
            output / "compressed-tensors", quantization_config=CompressedTensorsConfig(dequantize=True)
        )


def test_fused_layers_have_one_scheme(mixed):
    output, report = mixed
    config = json.loads((output / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    scheme = {name: key for key, group in config["config_groups"].items() for name in group["targets"]}
    assert set(scheme) | set(config["ignore"]) == {layer.name for layer in report.layers} | {"lm_head"}
    blocks = {name.rpartition(".")[0] for name in scheme}
    for block in blocks:
        for names in FUSED:
            assert len({scheme.get(f"{block}.{name}") for name in names}) == 1


def test_the_report_is_of_the_exported_file(mixed):
    output, report = mixed
    assert report.evaluation.export == "compressed-tensors"
    assert report.evaluation.difference.kl_divergence > 0
    stored = sum(file.stat().st_size for file in (output / "compressed-tensors").glob("*.safetensors"))
    assert {export.kind: export.stored_bytes for export in report.exports}["compressed-tensors"] == stored
    card = (output / "compressed-tensors" / "README.md").read_text()
    assert "vllm serve path/to/this/folder" in card
    assert "base_model_relation: quantized" in card


@pytest.mark.parametrize("part", [0.4, 0.7])
def test_a_size_is_that_of_the_file(make, llama, part):
    dense = (llama / "model.safetensors").stat().st_size
    size = round((0.55 + 0.45 * part) * dense)
    output, _ = make(target_bytes=size)
    stored = (output / "compressed-tensors" / "model.safetensors").stat().st_size
    assert 0.97 * size < stored <= size


def test_a_profile_serves_every_size(make, tmp_path, monkeypatch):
    profiles = ProfileCache(tmp_path / "profiles")
    make(profiles, bits=5)
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    make(profiles, bits=8)


def test_layers_that_all_stay_dense_leave_a_plain_model(make):
    output, _ = make(ratio=0.0, dtype="bfloat16")
    assert "quantization_config" not in json.loads((output / "compressed-tensors" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(output / "compressed-tensors")


def test_sequential_runs_resume_to_the_same_bytes(make, tmp_path, settings, llama):
    chosen = settings(ratio=None, bits=5, preset="best", sensitivity_samples=4, engine="vllm")
    seen = []

    def cancel():
        seen.append(1)
        return len(seen) == 60

    with pytest.raises(Exception, match="cancelled"):
        compress(str(llama), tmp_path / "twice", chosen, observer=Watch(should_cancel=cancel))
    compress(str(llama), tmp_path / "twice", chosen, resume=True)
    compress(str(llama), tmp_path / "once", chosen)
    twice, once = (tmp_path / name / "compressed-tensors" / "model.safetensors" for name in ("twice", "once"))
    assert twice.read_bytes() == once.read_bytes()


def test_what_it_cannot_store_is_refused_before_calibration(make, model_folder, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated"))
    with pytest.raises(InfeasibleBudgetError, match="3 bits per weight are out of reach"):
        make(bits=3)
    chosen = settings(ratio=None, bits=5, preset="fast", engine="vllm")
    with pytest.raises(InvalidConfigError, match="set dtype to bfloat16"):
        compress(str(model_folder("llama")), tmp_path / "a", chosen)
    with pytest.raises(UnsupportedArchitectureError, match=r"For vLLM, Rocket writes models .* ForCausalLM"):
        compress(str(model_folder("bert")), tmp_path / "b", chosen)


def test_an_evaluation_needs_the_package(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(InvalidConfigError, match=r"pip install 'rocket-compress\[vllm\]'"):
        make(bits=5, evaluate={"samples": 4, "sequence_length": 32})
