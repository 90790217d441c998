"""Layers of an artifact for an engine's kernels, decompressed by compressed-tensors and compared with their weights."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rocket_core.config import compression_config
from rocket_core.exports.conversion import export_artifact
from rocket_core.exports.exact_formats import compressed_tensors_config
from rocket_core.exports.kernel_layers import kernel_formats, kernel_tensors
from rocket_core.exports.stored_artifact import open_artifact
from rocket_core.layers import LayerEntry
from rocket_core.pipeline import compress
from tests.reference.tiny_models import save_tiny_model

ct = pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402

QKV = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]


TEXT = {"calibration": {"dataset": "builtin", "samples": 2, "sequence_length": 16}}
CASES = {
    "packed": {"method": "rtn", "code_bits": 3, "group_size": 32, **TEXT},
    # The last group of an output of 96 inputs has 32.
    "packed, with partial groups": {"method": "rtn", "code_bits": 3, "group_size": 64, **TEXT},
    "entropy coded": {"preset": "instant", "target_bytes": 40_000},
    "factors": {"ratio": 0.3, "preset": "fast", **TEXT},
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Return a compressed tiny Llama, made once."""

    @cache
    def make(case):
        model, out = (tmp_path_factory.mktemp(name) / "folder" for name in ("model", "out"))
        save_tiny_model("llama", model)
        if case == "packed, with partial groups":
            torch.manual_seed(0)
            config = LlamaConfig.from_pretrained(model, intermediate_size=96)
            LlamaForCausalLM(config).to(config.dtype).save_pretrained(model)
        compress(str(model), out, compression_config(**CASES[case]))
        return open_artifact(out / "rocket")

    return make


def decompressed(name, tensors, config):
    """Return the weight that compressed-tensors reads in a layer."""
    scheme = next(group for group in config["config_groups"].values() if name in group["targets"])
    parts = {part: tensors[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
    described = {key: value for key, value in scheme.items() if key != "format"}
    return PackedQuantizationCompressor.decompress(parts, QuantizationScheme(**described))["weight"]


@pytest.mark.parametrize(("case", "width"), [("packed", 4), ("packed, with partial groups", 4), ("entropy coded", 8)])
def test_kernels_get_the_weights_that_are_stored(case, width, artifact):
    opened = artifact(case)
    formats = kernel_formats(opened, 8)
    config = compressed_tensors_config(opened, formats)
    tensors = dict(kernel_tensors(opened, formats))
    assert len(formats) >= 10
    assert {one.bits for one in formats.values()} == {width}
    for name in formats:
        found, stored = decompressed(name, tensors, config).double(), opened.dense_weight(name).double()
        # Scales have 8 significant bits.
        assert bool(((found - stored).abs() <= 2.0**-8 * stored.abs()).all()), name


@pytest.mark.parametrize("case", CASES)
def test_all_other_tensors_are_those_of_a_dense_export(case, artifact, tmp_path):
    opened = artifact(case)
    formats = kernel_formats(opened, 8)
    export_artifact(opened.folder, tmp_path / "dense", "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    tensors = dict(kernel_tensors(opened, formats))
    others = {key: tensor for key, tensor in tensors.items() if "weight_" not in key}
    assert others.keys() == {key for key in dense if key.removesuffix(".weight") not in formats}
    assert all(torch.equal(tensor, dense[key]) for key, tensor in others.items())
    assert (case == "factors") == (not formats)


@pytest.mark.parametrize(
    ("bits", "sizes", "widest", "expected"),
    [
        # Groups of queries, keys and values; the format that holds all three.
        ((4, 4, 4), (32, 32, 32), 8, (4, 32)),
        ((2, 3, 5), (64, 32, 64), 8, (8, 32)),
        ((2, 3, 4), (64, 64, 64), 4, (4, 32)),
        ((2, 3, 5), (64, 64, 64), 4, None),
        ((4, 4, 4), (64, 16, 64), 8, None),
    ],
)
def test_layers_that_vllm_fuses_have_one_format(bits, sizes, widest, expected, artifact):
    opened = artifact("packed")
    changed = {
        name: LayerEntry(bits=width, group_size=size, scale_bits=8, scale_exponent=0)
        for name, width, size in zip(QKV, bits, sizes, strict=True)
    }
    formats = kernel_formats(replace(opened, entries={**opened.entries, **changed}), widest)
    found = {formats.get(name) and (formats[name].bits, formats[name].group_size) for name in QKV}
    assert found == {expected}
    # Without codes for one of them, all are dense.
    entries = {name: entry for name, entry in opened.entries.items() if name != QKV[0]}
    assert not set(QKV) & kernel_formats(replace(opened, entries=entries), widest).keys()
