"""Models for llama.cpp: one GGUF file, run here by llama.cpp itself."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocket_core.errors import InfeasibleBudgetError, UnsupportedArchitectureError
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.sizes.block_types import BLOCK_FORMATS
from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine
from tests.reference.observers import Watch

gguf = pytest.importorskip("gguf")
BUNDLED = Path("examples/tiny-llama")
PROMPT = "The module defines"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = gguf_models.save("llama", folder)
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def make(tmp_path_factory, settings, llama):
    def run(profiles=None, **changes):
        output = tmp_path_factory.mktemp("out")
        chosen = {"ratio": None, "preset": "fast", "sensitivity_samples": 4, "engine": "llama.cpp"} | changes
        return output, compress(str(llama[0]), output, settings(**chosen), profiles=profiles)

    return run


@pytest.fixture(scope="module")
def half(make, llama):
    size = round(0.35 * (llama[0] / "model.safetensors").stat().st_size)
    export = ("gguf", "dense")
    return size, *make(target_bytes=size, export=export, evaluate={"samples": 4, "sequence_length": 32})


def test_the_file_has_the_size_and_the_types_of_the_report(half):
    size, output, report = half
    file = output / "gguf" / "model.gguf"
    assert 0.95 * size < file.stat().st_size <= size
    assert {export.kind: export.stored_bytes for export in report.exports}["gguf"] == file.stat().st_size
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    types = [layer.block_type or "F32" for layer in report.layers if layer.name.endswith("down_proj")]
    stored = [tensors[f"blk.{number}.ffn_down.weight"] for number in range(len(types))]
    assert [tensor.tensor_type.name for tensor in stored] == types
    assert report.tables == ("model.embed_tokens",) or "model.embed_tokens" in report.tables
    assert all(layer.block_type in BLOCK_FORMATS for layer in report.layers if layer.kind == "quantized")
    assert report.bits_per_weight == pytest.approx(
        sum(8 * layer.stored_bytes for layer in report.layers)
        / sum(layer.d_in * layer.d_out for layer in report.layers)
    )


def test_llama_cpp_finds_the_tokens_of_our_reconstruction(tmp_path, settings):
    # A trained model: what llama.cpp rounds in the inputs of layers hardly matters.
    chosen = settings(
        ratio=None,
        target_bytes=1_600_000,
        preset="fast",
        sensitivity_samples=4,
        engine="llama.cpp",
        export=("gguf", "dense"),
    )
    compress(str(BUNDLED), tmp_path, chosen)
    assert (tmp_path / "gguf" / "model.gguf").stat().st_size <= 1_600_000
    engine = Engine(tmp_path / "gguf" / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    prompt = tokenizer(PROMPT)["input_ids"]
    assert engine.tokens(PROMPT) == prompt
    tokens, chances = engine.greedy(prompt, 24)
    with torch.no_grad():
        logits = dense(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(dim=-1)
    own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # Each is the likeliest, or as good as.
    assert bool((logits.amax(dim=1) - own < 0.1).all())
    assert chances == pytest.approx(own.tolist(), abs=0.15)


def test_the_evaluation_reads_the_file(half):
    _, _, report = half
    assert report.evaluation.export == "gguf"
    assert 0 < report.evaluation.difference.kl_divergence < 1


def test_what_to_type_is_in_the_card(half):
    _, output, _ = half
    card = (output / "gguf" / "README.md").read_text()
    for said in ("llama-server -m path/to/this/folder/model.gguf", "ollama create compressed -f", "tags: [rocket"):
        assert said in card
    assert (output / "gguf" / "Modelfile").read_text() == "FROM ./model.gguf\n"


def test_sequential_runs_resume_to_the_same_bytes(make, tmp_path, settings, llama):
    chosen = settings(ratio=None, bits=5, preset="best", sensitivity_samples=4, engine="llama.cpp")
    seen = []

    def cancel():
        seen.append(1)
        return len(seen) == 60

    with pytest.raises(Exception, match="cancelled"):
        compress(str(llama[0]), tmp_path / "twice", chosen, observer=Watch(should_cancel=cancel))
    compress(str(llama[0]), tmp_path / "twice", chosen, resume=True)
    compress(str(llama[0]), tmp_path / "once", chosen)
    twice, once = (tmp_path / name / "gguf" / "model.gguf" for name in ("twice", "once"))
    assert twice.read_bytes() == once.read_bytes()


def test_a_profile_serves_every_size(make, tmp_path, monkeypatch):
    profiles = ProfileCache(tmp_path / "profiles")
    make(profiles, bits=5)
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    make(profiles, bits=8)


def test_what_it_cannot_store_is_refused_before_calibration(make, model_folder, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated"))
    with pytest.raises(InfeasibleBudgetError, match="3 bits per weight are out of reach"):
        make(bits=3)
    chosen = settings(ratio=None, bits=5, preset="fast", engine="llama.cpp")
    with pytest.raises(
        UnsupportedArchitectureError, match=r"For llama\.cpp, Rocket writes models whose class .* LlamaFor"
    ):
        compress(str(model_folder("opt")), tmp_path / "a", chosen)


def test_the_report_counts_the_whole_file(half, llama):
    size, output, _ = half
    report = json.loads((output / "report.json").read_text())
    assert report["totals"]["stored_bytes"] <= size
