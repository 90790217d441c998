"""Mixtures of experts for vLLM: all experts in one format, read here by stock transformers."""

import json
import re
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.exports.conversion import export_artifact
from rocket_core.pipeline import compress
from tests.reference import gguf_models

pytest.importorskip("compressed_tensors")
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
TOKENS = torch.arange(3, 60)[None]
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.05}
CHOSEN = {"ratio": None, "preset": "fast", "sensitivity_samples": 4, "engine": "vllm"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a random mixture in bfloat16, made once."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("models") / family
        sizes = SIZES if family.startswith("qwen") else {**SIZES, "intermediate_size": 64}
        if not family.startswith("qwen"):
            del sizes["moe_intermediate_size"]
        gguf_models.build(family, **sizes).bfloat16().save_pretrained(folder)
        gguf_models.save_tokenizer("prefixed", folder)
        return folder

    return make


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, model, settings):
    """Return output and report of a run of a family, made once."""

    @cache
    def run(family):
        output = tmp_path_factory.mktemp("out")
        config = settings(**CHOSEN, bits=5.5, export=("compressed-tensors", "dense", "rocket"))
        return output, compress(str(model(family)), output, config)

    return run


@torch.no_grad()
def logits(folder):
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    return loaded(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_transformers_computes_our_reconstruction(self, family, mixed, model):
        output, report = mixed(family)
        assert {layer.bits for layer in report.layers} == {4, 8}
        found = logits(output / "compressed-tensors")
        assert torch.equal(found, logits(output / "dense"))
        assert not torch.equal(found, logits(model(family)))

    def test_a_later_export_is_the_same(self, family, mixed, tmp_path):
        output, _ = mixed(family)
        export_artifact(output / "rocket", tmp_path / "later", "compressed-tensors")
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "later" / name).read_bytes() == (output / "compressed-tensors" / name).read_bytes()

    def test_experts_have_one_scheme(self, family, mixed):
        # vLLM, `compressed_tensors_moe/compressed_tensors_moe.py`: `get_moe_method` takes the scheme of
        # `PREFIX.0.gate_proj`, `.0.up_proj` and `.0.down_proj`, and refuses a layer where they differ.
        output, report = mixed(family)
        config = json.loads((output / "compressed-tensors" / "config.json").read_text())["quantization_config"]
        groups = config["config_groups"].values()
        for name in ("mlp.experts", "block_sparse_moe.experts", "mlp.experts.routed_experts"):
            for part in ("gate_proj", "up_proj", "down_proj"):
                asked = f"model.layers.1.{name}.0.{part}"
                [scheme] = [group for group in groups if matches(asked, group["targets"])]
                # `_is_wNa16_group_channel`, and `create_weights` of `CompressedTensorsWNA16MarlinMoEMethod`.
                weights = scheme["weights"]
                assert weights["symmetric"]
                assert weights["num_bits"] in (4, 8)
                assert (128 % weights["group_size"], 64 % weights["group_size"]) == (0, 0)
        of_experts = [layer for layer in report.layers if ".experts." in layer.name]
        assert len(of_experts) == 2 * 3 * gguf_models.EXPERTS
        assert {layer.bits for layer in of_experts} == {weights["num_bits"]}

    def test_tensors_are_named_as_in_the_checkpoint(self, family, mixed, model):
        output, _ = mixed(family)
        stored = load_file(output / "compressed-tensors" / "model.safetensors")
        source = load_file(model(family) / "model.safetensors")
        packed = {key.removesuffix("_packed") for key in stored if key.endswith("weight_packed")}
        assert packed < source.keys()
        assert sum(".experts." in key for key in packed) == 2 * 3 * gguf_models.EXPERTS

    def test_what_is_dense_is_ignored_by_name(self, family, mixed):
        # vLLM looks a scheme up for every linear layer, routers included.
        output, _ = mixed(family)
        config = json.loads((output / "compressed-tensors" / "config.json").read_text())["quantization_config"]
        stored = load_file(output / "compressed-tensors" / "model.safetensors")
        dense = {key.removesuffix(".weight") for key, value in stored.items() if value.ndim == 2 and "weight" in key}
        dense = {name for name in dense if not name.endswith(("_packed", "_scale", "embed_tokens"))}
        assert dense <= set(config["ignore"])
        assert any(re.fullmatch(r"model\.layers\.0\.(mlp|block_sparse_moe)\.gate", name) for name in dense)
        assert ("model.layers.1.mlp.shared_expert_gate" in dense) == (family == "qwen2_moe")


def matches(name, targets):
    """Return whether a layer is one of the targets, as vLLM's `_is_equal_or_regex_match` says."""
    return any(re.match(target[3:], name) if target.startswith("re:") else target == name for target in targets)


def test_other_layers_may_stay_dense(model, settings, tmp_path):
    config = settings(**CHOSEN, bits=5, ignore=("*.self_attn.*",), export=("compressed-tensors", "dense"))
    compress(str(model("qwen3_moe")), tmp_path, config)
    assert torch.equal(logits(tmp_path / "compressed-tensors"), logits(tmp_path / "dense"))


def test_experts_are_quantized_if_anything_is(model, settings, tmp_path):
    # transformers takes dense experts next to quantized layers for quantized ones.
    report = compress(str(model("qwen3_moe")), tmp_path / "most", settings(**CHOSEN, bits=15.9))
    assert {layer.bits for layer in report.layers if ".experts." in layer.name} == {8}
    for pattern in ("*.experts.1.up_proj", "*.experts.*"):
        with pytest.raises(InvalidConfigError, match=r"experts\.\d+\.\w+ dense next to quantized .* ignore no experts"):
            compress(str(model("mixtral")), tmp_path / "some", settings(**CHOSEN, bits=5, ignore=(pattern,)))


def test_sizes_without_a_common_format_are_refused(settings, tmp_path):
    folder = tmp_path / "model"
    gguf_models.build("olmoe", hidden_size=64, intermediate_size=40, num_hidden_layers=1).bfloat16().save_pretrained(
        folder
    )
    gguf_models.save_tokenizer("prefixed", folder)
    with pytest.raises(UnsupportedArchitectureError, match="layers with 40 and 64 inputs have none in common"):
        compress(str(folder), tmp_path / "out", settings(**CHOSEN, bits=8))
