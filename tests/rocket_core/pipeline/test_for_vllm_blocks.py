"""Models for vLLM in INT8, FP8 and NVFP4: files of compressed-tensors, read here by stock transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rocket_core.config import compression_config
from rocket_core.engines import VLLM_FP8, VLLM_INT8, VLLM_NVFP4
from rocket_core.errors import InfeasibleBudgetError, UnsupportedArchitectureError
from rocket_core.evaluation import load_model, open_model
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.pipeline import compress
from rocket_core.sizes.block_types import BLOCK_FORMATS
from rocket_core.sizes.code_format import fewest_bytes

pytest.importorskip("compressed_tensors")
BUNDLED = Path("examples/tiny-llama")
SIZE = 2_560_000


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Compress the bundled model to layers of both formats."""
    output = tmp_path_factory.mktemp("out")
    chosen = compression_config(
        target_bytes=SIZE,
        preset="fast",
        calibration={"dataset": "builtin", "samples": 32, "sequence_length": 128},
        sensitivity_samples=4,
        engine="vllm-nvfp4",
        export=("compressed-tensors", "dense"),
        evaluate={"samples": 4, "sequence_length": 32},
    )
    return output, compress(str(BUNDLED), output, chosen)


@pytest.fixture(scope="module")
def tokens(result):
    text = (BUNDLED / "heldout.txt").read_text()[:4000]
    ids = open_model(result[0] / "dense").tokenizer(text)["input_ids"]
    return torch.tensor(ids[:512]).view(4, 128)


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.double()


def test_the_file_has_the_size_and_the_formats_of_the_report(result):
    output, report = result
    folder = output / "compressed-tensors"
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.99 * SIZE < written <= SIZE
    assert {export.kind: export.stored_bytes for export in report.exports}["compressed-tensors"] == written
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    described = {
        name: "FP8" if group["input_activations"] else "NVFP4"
        for group in config["config_groups"].values()
        for name in group["targets"]
    }
    assert described == {layer.name: layer.block_type for layer in report.layers}
    assert set(described.values()) == {"FP8", "NVFP4"}
    assert config["ignore"] == ["lm_head"]
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for first in (name for name in described if names[0] in name):
            assert len({described[first.replace(names[0], part)] for part in names}) == 1


def check_in_transformers(output, tokens):
    """Check that transformers computes what our reconstruction does, but for inputs that it rounds."""
    loaded = AutoModelForCausalLM.from_pretrained(output / "compressed-tensors", dtype="auto")
    dense = AutoModelForCausalLM.from_pretrained(output / "dense", dtype="auto")
    loaded(tokens[:, :2])  # decompresses it
    rounded = logits(loaded, tokens)
    for module in loaded.modules():
        # Inputs are not rounded then.
        module.quantization_enabled = False
    assert torch.equal(logits(loaded, tokens), logits(dense, tokens))
    assert not torch.equal(rounded, logits(dense, tokens))


def test_transformers_computes_what_our_reconstruction_does(result, tokens):
    check_in_transformers(result[0], tokens)


def test_the_evaluation_counts_rounded_inputs(result):
    _, report = result
    assert report.evaluation.export == "compressed-tensors"
    assert 0 < report.evaluation.difference.kl_divergence < 0.05


def test_rounding_to_nearest_in_the_same_formats_is_worse(result, tokens):
    output, report = result

    def divergence(model):
        chances = logits(model, tokens).log_softmax(dim=-1)
        return float((known.exp() * (known - chances)).sum(dim=-1).mean())

    original, plain, ours = (
        load_model(open_model(folder), torch.device("cpu")).float() for folder in (BUNDLED, BUNDLED, output / "dense")
    )
    known = logits(original, tokens).log_softmax(dim=-1)
    for layer in report.layers:
        module = plain.get_submodule(layer.name)
        weight = module.weight.detach().T
        scales = search_block_scales(weight, torch.ones(len(weight)), BLOCK_FORMATS[layer.block_type])
        module.weight.data.copy_(round_to_nearest(weight, scales).rows(torch.float32))
    assert divergence(ours) < 0.6 * divergence(plain)


@pytest.mark.parametrize(("name", "stored"), [("int8", "int-quantized"), ("fp8", "float-quantized")])
def test_a_weight_with_rounded_inputs_takes_a_byte(name, stored, tokens, tmp_path):
    chosen = {"engine": f"vllm-{name}", "preset": "instant", "export": ("compressed-tensors", "dense")}
    report = compress(str(BUNDLED), tmp_path / "out", compression_config(**chosen, bits=8.1))
    assert {layer.block_type for layer in report.layers} == {name.upper()}
    config = json.loads((tmp_path / "out" / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    assert config["format"] == stored
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"]
    check_in_transformers(tmp_path / "out", tokens)
    with pytest.raises(InfeasibleBudgetError, match="7 bits per weight are out of reach"):
        compress(str(BUNDLED), tmp_path / "less", compression_config(**chosen, bits=7))


@pytest.mark.parametrize(
    ("engine", "blocks"), [(VLLM_INT8, ("INT8",)), (VLLM_FP8, ("FP8",)), (VLLM_NVFP4, ("FP8", "NVFP4"))]
)
def test_the_engine_decides_kinds_and_exports(engine, blocks):
    config = compression_config(engine=engine.name, target_bytes=10**6)
    assert (config.kinds, config.export, config.budget) == (("quantized",), ("compressed-tensors",), "bytes")
    assert not config.decides_tables
    assert engine.codes.blocks == blocks
    assert fewest_bytes(512, 10, engine.codes) == BLOCK_FORMATS[blocks[-1]].stored_bytes(512, 10)
    assert fewest_bytes(50, 10, engine.codes) is None
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    with pytest.raises(UnsupportedArchitectureError, match="mixture of 4 experts"):
        check_engine(mixture, 2, engine, "the model")
