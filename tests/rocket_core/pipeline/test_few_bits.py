"""Originals in few bits: read, counted as they are stored, and written in the dtype in which they compute."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401 - registers the format of artifacts
from rocket_core.errors import (
    AlreadyQuantizedError,
    CompressionCancelledError,
    CorruptCheckpointError,
    InfeasibleBudgetError,
    InvalidConfigError,
)
from rocket_core.hub.requests import check_request
from rocket_core.pipeline import Observer, compress
from tests.reference import gguf_models
from tests.reference.few_bit_models import code_fp8, describe, save_few_bits
from tests.reference.observers import Watch
from tests.reference.tiny_mixtures import inputs
from tests.rocket_core.exports.test_gguf_engine import export

FAST = {"ratio": None, "preset": "fast", "sensitivity_samples": 4, "export": ("rocket",)}


class Warnings(Observer):
    def __init__(self):
        self.warnings = []

    def on_warning(self, warning):
        self.warnings.append(warning)


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("scheme", "bits"), [("fp8 deepseek_v3", 8.5), ("fp8 qwen3", 8.5), ("mxfp4", 4.25), ("pack-quantized", 5.0)]
)
def test_a_size_smaller_than_the_original_is_met(scheme, bits, tmp_path, settings):
    folder = save_few_bits(scheme, tmp_path / "model")
    size = int(0.9 * size_of(folder))
    report = compress(str(folder), tmp_path / "out", settings(**FAST, target_bytes=size))
    result = tmp_path / "out" / "rocket"
    assert 0.95 * size < size_of(result) <= size
    assert report.totals.dense_bytes == size_of(folder)
    assert report.totals.original_bits == pytest.approx(bits, abs=0.5)
    assert f"original: {report.totals.original_bits:.3g} bits" in (result / "README.md").read_text()
    assert json.loads((result / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(result)
    assert model.dtype == torch.bfloat16
    assert model.generate(inputs(1), max_new_tokens=4, do_sample=False).shape == (1, 24)


@pytest.mark.parametrize(
    ("family", "engine", "file"),
    [
        ("qwen3", "llama.cpp", "gguf/model.gguf"),
        ("qwen3_moe", "llama.cpp", "gguf/model.gguf"),
        ("qwen3_moe", "vllm", "compressed-tensors/model.safetensors"),
    ],
)
def test_an_original_in_fp8_is_written_for_other_engines(family, engine, file, tmp_path, settings):
    gguf_models.save(family, tmp_path / "model", num_hidden_layers=2)
    folder = code_fp8(tmp_path / "model", (32, 32))
    options = {key: value for key, value in FAST.items() if key != "export"}
    report = compress(str(folder), tmp_path / "out", settings(**options, engine=engine, bits=5.5))
    assert (tmp_path / "out" / file).stat().st_size < report.totals.dense_bytes


def test_layers_left_alone_are_written_decoded(tmp_path, settings):
    folder = save_few_bits("mxfp4", tmp_path / "model")
    chosen = settings(**FAST, bits=16.0, include=(), engine="rocket")
    compress(str(folder), tmp_path / "out", chosen)
    config = json.loads((tmp_path / "out" / "rocket" / "config.json").read_text())
    assert "quantization_config" not in config or config["quantization_config"]["quant_method"] != "mxfp4"
    stored = load_file(tmp_path / "out" / "rocket" / "model.safetensors")
    assert not [key for key in stored if key.endswith(("_blocks", "_scales"))]


def test_a_ratio_of_bytes_counts_what_the_checkpoint_stores(tmp_path, settings):
    folder = save_few_bits("fp8 llama", tmp_path / "model")
    report = compress(
        str(folder), tmp_path / "out", settings(**FAST | {"ratio": 0.3}, budget="bytes", kinds=("quantized",))
    )
    assert 0.3 <= report.totals.achieved_byte_ratio < 0.4
    assert size_of(tmp_path / "out" / "rocket") < size_of(folder)


def test_an_unreachable_ratio_names_one_of_the_same_bytes(tmp_path, settings):
    folder = save_few_bits("pack-quantized", tmp_path / "model")
    chosen = FAST | {"budget": "bytes", "kinds": ("quantized",)}
    with pytest.raises(InfeasibleBudgetError) as refusal:
        compress(str(folder), tmp_path / "out", settings(**chosen | {"ratio": 0.9}))
    nearest = refusal.value.nearest_ratio
    report = compress(str(folder), tmp_path / "out", settings(**chosen | {"ratio": nearest}))
    assert report.totals.achieved_byte_ratio == pytest.approx(nearest, abs=0.01)


def test_a_ratio_of_parameters_warns_of_a_larger_result(tmp_path, settings):
    folder, observer = save_few_bits("fp8 llama", tmp_path / "model"), Warnings()
    compress(str(folder), tmp_path / "out", settings(), observer=observer)
    assert any("stores weights in 8.5 bits" in warning for warning in observer.warnings)


def test_the_original_is_evaluated_decoded(tmp_path, settings, text):
    folder = save_few_bits("mxfp4", tmp_path / "model")
    evaluate = {"dataset": str(text), "samples": 2, "sequence_length": 32}
    report = compress(str(folder), tmp_path / "out", settings(**FAST, bits=16.0, evaluate=evaluate))
    assert report.evaluation.difference.kl_divergence < 0.01


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "gptq"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}, "format": "marlin-24"}}},
            "marlin-24",
        ),
        ({"quant_method": ["x"]}, "not known"),
        ("fp8", "not known"),
    ],
)
def test_other_schemes_are_refused_by_name(quantization, words, tmp_path, settings):
    folder = save_few_bits("fp8 llama", tmp_path / "model")
    describe(folder, quantization_config=quantization)
    with pytest.raises(AlreadyQuantizedError, match=words):
        check_request(str(folder), settings())
    with pytest.raises(AlreadyQuantizedError, match=words):
        compress(str(folder), tmp_path / "out", settings())


def test_a_description_of_other_weights_is_refused(tmp_path, settings):
    folder = save_few_bits("fp8 llama", tmp_path / "model")
    describe(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    with pytest.raises(CorruptCheckpointError, match=r"weight_scale_inv F32 .*restore the config\.json"):
        compress(str(folder), tmp_path / "out", settings())
    describe(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(AlreadyQuantizedError, match=r"no weight as its config\.json says \(mxfp4\)"):
        compress(str(folder), tmp_path / "out", settings())


def test_a_gguf_file_is_resumed_to_the_same_bytes(tmp_path, settings):
    gguf_models.save("llama", tmp_path / "original", hidden_size=256, intermediate_size=256)
    export(tmp_path / "original", tmp_path / "model.gguf", choose=lambda _key, _shape: "Q4_K")
    given, config = str(tmp_path / "model.gguf"), settings(**FAST | {"ratio": 0.3})
    compress(given, tmp_path / "whole", config)
    steps = iter(range(10**9))
    with pytest.raises(CompressionCancelledError):
        compress(given, tmp_path / "parts", config, observer=Watch(should_cancel=lambda: next(steps) == 60))
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [".rocket-work"]
    compress(given, tmp_path / "parts", config, resume=True)
    whole, parts = ((tmp_path / name / "rocket" / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_a_size_that_a_gguf_file_has_is_refused(tmp_path, settings):
    gguf_models.save("llama", tmp_path / "original")
    export(tmp_path / "original", tmp_path / "model.gguf")
    size = (tmp_path / "model.gguf").stat().st_size
    with pytest.raises(InvalidConfigError, match="nothing is to be done"):
        compress(str(tmp_path / "model.gguf"), tmp_path / "out", settings(**FAST, target_bytes=size))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
