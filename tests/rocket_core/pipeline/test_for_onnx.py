"""Models for ONNX Runtime: a folder that the model builder of ONNX Runtime GenAI reads."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rocket_core.config import compression_config
from rocket_core.engines import ONNX
from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.evaluation import load_model, open_model
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.pipeline import compress
from rocket_core.report.run_commands import run_commands

BUNDLED = Path("examples/tiny-llama")
SIZE = 2_000_000


@pytest.fixture(scope="module")
def result(tmp_path_factory, settings):
    output = tmp_path_factory.mktemp("out")
    chosen = settings(ratio=None, target_bytes=SIZE, preset="fast", sensitivity_samples=4, engine="onnx")
    return output / "olive", compress(str(BUNDLED), output, chosen)


def test_the_file_has_the_size_and_the_formats_of_the_report(result):
    folder, report = result
    written = (folder / "model.safetensors").stat().st_size
    assert 0.99 * SIZE < written <= SIZE
    assert [(export.kind, export.stored_bytes) for export in report.exports] == [("olive", written)]
    described = json.loads((folder / "config.json").read_text())["quantization_config"]["overrides"]
    assert described == {layer.name: {"bits": layer.bits, "group_size": layer.group_size} for layer in report.layers}
    assert len({layer.bits for layer in report.layers}) > 1
    assert (folder / "tokenizer.json").is_file()


def test_the_files_are_read_back_as_they_are_stored(result):
    folder, report = result
    model = load_model(open_model(folder), torch.device("cpu"))
    tensors = load_file(folder / "model.safetensors")
    layer = next(layer for layer in report.layers if layer.bits == 8)
    codes = tensors[f"{layer.name}.qweight"].float() - 128
    scales = tensors[f"{layer.name}.scales"].float().repeat_interleave(layer.group_size, dim=1)
    assert torch.equal(model.get_submodule(layer.name).weight, codes * scales)
    assert torch.equal(model.get_input_embeddings().weight, tensors["model.embed_tokens.weight"].float())


def test_the_command_keeps_a_table_that_two_share(result):
    folder, report = result
    (command,) = run_commands(report, "olive", str(folder))
    assert "shared_embeddings=true" in shlex.split(command.text)
    separate = report.tensors[0].model_copy(update={"name": "lm_head.weight"})
    untied = report.model_copy(update={"tensors": (*report.tensors, separate)})
    assert "shared_embeddings" not in run_commands(untied, "olive", str(folder))[0].text


def test_no_layer_stays_dense_for_a_larger_size(tmp_path):
    report = compress(str(BUNDLED), tmp_path, compression_config(bits=12, preset="instant", engine="onnx"))
    assert {(layer.kind, layer.bits, layer.group_size) for layer in report.layers} == {("quantized", 8, 32)}


def test_ignored_layers_are_refused(tmp_path, settings):
    with pytest.raises(InvalidConfigError, match=r"have codes for every linear layer, and .* is ignored"):
        compress(str(BUNDLED), tmp_path, settings(ratio=None, bits=5, engine="onnx", ignore=("*.o_proj",)))


def test_layers_that_suit_no_format_are_refused(tmp_path, settings, model_folder):
    with pytest.raises(UnsupportedArchitectureError, match=r"in groups of 32, 64 or 128 inputs, and .* has"):
        compress(str(model_folder("llama")), tmp_path, settings(ratio=None, bits=5, engine="onnx", dtype="bfloat16"))


def test_the_engine_decides_kinds_and_exports():
    config = compression_config(engine="onnx", target_bytes=10**6)
    assert (config.kinds, config.export, config.budget) == (("quantized",), ("olive",), "bytes")
    assert not config.decides_tables


def test_what_it_does_not_read_is_refused():
    with pytest.raises(InvalidConfigError, match="engine onnx does not read export gguf"):
        compression_config(engine="onnx", bits=5, export=("gguf",))
    for name in ("GPT2LMHeadModel", "Gemma3ForCausalLM", "MixtralForCausalLM"):
        with pytest.raises(UnsupportedArchitectureError, match="For ONNX Runtime, Rocket writes"):
            check_engine({"architectures": [name]}, 2, ONNX, "the model")
    with pytest.raises(InvalidConfigError, match="ONNX Runtime runs models in 16 bits"):
        check_engine({"architectures": ["LlamaForCausalLM"]}, 4, ONNX, "the model")
