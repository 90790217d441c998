"""Mixtures of experts for llama.cpp: one block type for each projection of a block's experts."""

import re
import shutil
from collections import defaultdict
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rocket_core.errors import CompressionCancelledError, InvalidConfigError
from rocket_core.evaluation import load_model, open_gguf, open_model
from rocket_core.pipeline import compress
from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine
from tests.reference.observers import Watch

gguf = pytest.importorskip("gguf")
# One that transformers reads, with an expert for all tokens, and two that it does not.
FAMILIES = ["qwen2_moe", "mixtral", "gpt_oss"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a random mixture, made once."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("models") / family
        gguf_models.save(family, folder, num_hidden_layers=2)
        return folder

    return make


@pytest.fixture(scope="module")
def quarter(tmp_path_factory, model, settings):
    """Return size, output and report of a run of a family to a quarter of its bytes, made once."""

    @cache
    def run(family):
        size = round(0.24 * (model(family) / "model.safetensors").stat().st_size)
        config = settings(
            ratio=None,
            target_bytes=size,
            preset="fast",
            sensitivity_samples=12,
            engine="llama.cpp",
            export=("gguf", "dense"),
            evaluate={"samples": 4, "sequence_length": 32},
        )
        output = tmp_path_factory.mktemp("out")
        return size, output, compress(str(model(family)), output, config)

    return run


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.soak
def test_preset_best_fills_a_file_of_the_size_asked_for(model, settings, tmp_path):
    size = round(0.24 * (model("mixtral") / "model.safetensors").stat().st_size)
    sizes = {"ratio": None, "target_bytes": size, "sensitivity_samples": 4, "evaluate": {"sequence_length": 32}}
    config = settings(preset="best", engine="llama.cpp", export=("gguf",), **sizes)
    report = compress(str(model("mixtral")), tmp_path, config)
    assert 0.95 * size < (tmp_path / "gguf" / "model.gguf").stat().st_size <= size
    # As precise as without compensation, or more, on a model of random weights.
    assert report.evaluation.difference.kl_divergence < 0.05
    assert all(layer.achieved_error < 0.5 for layer in report.layers)


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_the_file_takes_the_size_asked_for(self, family, quarter):
        size, output, report = quarter(family)
        file = output / "gguf" / "model.gguf"
        assert 0.95 * size < file.stat().st_size <= size
        assert {export.kind: export.stored_bytes for export in report.exports}["gguf"] == file.stat().st_size

    def test_experts_of_a_projection_have_one_type(self, family, quarter):
        _, output, report = quarter(family)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(output / "gguf" / "model.gguf").tensors}
        types = defaultdict(set)
        for layer in report.layers:
            found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj", layer.name)
            if found:
                types[f"blk.{found[1]}.ffn_{found[2]}_exps.weight"].add(layer.block_type or "F32")
        assert len(types) == 3 * 2
        for name, chosen in types.items():
            assert chosen == {tensors[name].tensor_type.name}
        assert len(set.union(*types.values())) > 1
        assert all(tensors[f"blk.{number}.ffn_gate_inp.weight"].tensor_type.name == "F32" for number in range(2))

    def test_experts_are_rounded_one_by_one(self, family, quarter):
        _, _, report = quarter(family)
        errors = [layer.achieved_error for layer in report.layers if "layers.0.mlp.experts" in layer.name]
        assert len(set(errors)) == len(errors) == 3 * gguf_models.EXPERTS

    def test_the_file_is_our_reconstruction(self, family, quarter, model):
        _, output, _ = quarter(family)
        read = load_model(open_gguf(output / "gguf", open_model(model(family))), torch.device("cpu"))
        expected = loaded(output / "dense").state_dict()
        for key, tensor in read.state_dict().items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6, msg=key)

    def test_llama_cpp_finds_its_tokens(self, family, quarter):
        _, output, _ = quarter(family)
        dense, prompt = loaded(output / "dense"), [1, *range(300, 320)]
        tokens, chances = Engine(output / "gguf" / "model.gguf").greedy(prompt, 8)
        with torch.no_grad():
            logits = dense(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(dim=-1)
        own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        # Random experts differ far more than trained ones, and a token that is routed to others differs as well.
        assert chances == pytest.approx(own.tolist(), abs=0.5)
        assert sum(bool(best - found < 0.2) for best, found in zip(logits.amax(dim=1), own, strict=True)) >= 6

    def test_the_evaluation_reads_the_file(self, family, quarter):
        _, _, report = quarter(family)
        assert report.evaluation.export == "gguf"
        assert 0 < report.evaluation.difference.kl_divergence < 2


def test_the_gate_of_a_shared_expert_stays_exact(quarter, model):
    _, output, report = quarter("qwen2_moe")
    reasons = {name: reason for name, reason in report.skipped.items() if name.endswith("shared_expert_gate")}
    assert list(reasons.values()) == ["llama.cpp reads it as it is"] * 2
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(output / "gguf" / "model.gguf").tensors}
    gate = loaded(model("qwen2_moe")).model.layers[1].mlp.shared_expert_gate.weight
    assert torch.equal(torch.from_numpy(tensors["blk.1.ffn_gate_inp_shexp.weight"].data.copy()), gate.detach()[0])


def test_a_stopped_run_ends_with_identical_bytes(model, settings, tmp_path):
    config = settings(ratio=None, bits=6, preset="fast", sensitivity_samples=4, engine="llama.cpp")
    # While profiling, and while the file is written.
    for stop in ("mlp.experts.2.up_proj", "layers.1.block_sparse_moe.experts.1.w2"):
        seen = []
        with pytest.raises(CompressionCancelledError):
            compress(
                str(model("mixtral")),
                tmp_path / "twice",
                config,
                resume=True,
                observer=Watch(
                    on_progress=seen.append,
                    should_cancel=lambda: bool(seen) and stop in (seen[-1].layer or ""),  # noqa: B023
                ),
            )
    compress(str(model("mixtral")), tmp_path / "twice", config, resume=True)
    compress(str(model("mixtral")), tmp_path / "once", config)
    twice, once = (tmp_path / name / "gguf" / "model.gguf" for name in ("twice", "once"))
    assert twice.read_bytes() == once.read_bytes()


def test_experts_in_one_tensor_make_the_same_file(model, settings, tmp_path):
    config = settings(ratio=None, bits=6, preset="fast", sensitivity_samples=4, engine="llama.cpp")
    whole = tmp_path / "whole"
    shutil.copytree(model("mixtral"), whole)
    state = AutoModelForCausalLM.from_pretrained(whole).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, whole / "model.safetensors")
    files = []
    for folder in (model("mixtral"), whole):
        compress(str(folder), tmp_path / "out" / folder.name, config)
        reader = gguf.GGUFReader(tmp_path / "out" / folder.name / "gguf" / "model.gguf")
        files.append({tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in reader.tensors})
    assert files[0] == files[1]


def test_experts_are_ignored_together(model, settings, tmp_path):
    chosen = {"ratio": None, "bits": 6, "preset": "fast", "sensitivity_samples": 4, "engine": "llama.cpp"}
    some = settings(**chosen, ignore=("*.experts.1.up_proj",))
    with pytest.raises(InvalidConfigError, match=r"experts\.1\.up_proj is ignored .*'\*\.experts\.\*\.up_proj'"):
        compress(str(model("mixtral")), tmp_path / "some", some)
    everywhere = settings(**chosen, ignore=("*.experts.*.up_proj",))
    compress(str(model("mixtral")), tmp_path / "all", everywhere)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "all" / "gguf" / "model.gguf").tensors}
    assert tensors["blk.0.ffn_up_exps.weight"].tensor_type.name == "F32"
    assert tensors["blk.0.ffn_down_exps.weight"].tensor_type.name != "F32"
