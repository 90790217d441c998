from dataclasses import replace

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from rocket_core.checkpoint import WeightLoader, open_checkpoint
from rocket_core.checkpoint.decoders import DECODERS
from rocket_core.hub.requests import read_settings, read_weights
from rocket_core.inspection.headers.coded_tensors import coded_format
from rocket_core.inspection.headers.coding_schemes import SCHEMES, Coding
from rocket_core.models.architecture import build_architecture, read_config
from tests.reference.few_bit_models import COMPRESSED, describe, save_few_bits, save_fp8
from tests.reference.tiny_mixtures import inputs, save_tiny_mixture


def opened(folder):
    return open_checkpoint(folder, coded_format(read_settings(folder, "m"), "m"))


def logits(folder):
    """Return what the model computes in float32 with weights that this library decodes."""
    architecture = build_architecture(read_config(folder), torch.float32)
    model = architecture.model
    loader = WeightLoader(model, opened(folder), torch.device("cpu"))
    loader.load([name for name, _ in model.named_children()])
    with torch.no_grad():
        return model(inputs()).logits


def oracle(folder, quantization):
    """Return what the model computes in float32 with weights that transformers decodes."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.bfloat16)
    with torch.no_grad():
        return model.float()(inputs()).logits


def test_every_scheme_has_a_decoder():
    assert {scheme.name for scheme in SCHEMES} == set(DECODERS) == set(Coding)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_fp8_is_decoded_as_by_transformers(family, tmp_path):
    folder = save_few_bits(f"fp8 {family}", tmp_path)
    torch.testing.assert_close(logits(folder), oracle(folder, FineGrainedFP8Config(dequantize=True)))


def test_incomplete_blocks_of_fp8_have_their_own_scales(tmp_path):
    folder = save_fp8("llama", tmp_path, (24, 56))
    stored, entries = load_file(folder / "model.safetensors"), opened(folder).entries
    coded = [key for key in stored if f"{key}_scale_inv" in stored]
    assert any(side % 24 for key in coded for side in stored[key].shape)
    for key in coded:
        expected = _dequantize_fp8_weight(stored[key], stored[f"{key}_scale_inv"], [24, 56], torch.float32)
        assert torch.equal(entries[key].read(), expected.bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (32,), (32, 1)])
def test_fp8_may_have_a_scale_per_tensor_or_row(shape, tmp_path):
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.1
    codes = torch.randn(32, 48).to(torch.float8_e4m3fn)
    save_file({"layers.0.up.weight": codes, "layers.0.up.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    description = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}, "dtype": "float32"}
    (entry,) = open_checkpoint(tmp_path, coded_format(description, "m")).entries.values()
    rows = scale.reshape(-1, 1).expand(32, 1)
    assert torch.equal(entry.read(), codes.float() * rows)


def test_mxfp4_is_decoded_as_by_transformers(tmp_path):
    folder = save_few_bits("mxfp4", tmp_path)
    torch.testing.assert_close(logits(folder), oracle(folder, Mxfp4Config(dequantize=True)))


# It asks for what transformers does anyway.
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compressed_tensors_are_decoded_as_by_transformers(scheme, tmp_path):
    folder = save_few_bits(scheme, tmp_path)
    torch.testing.assert_close(logits(folder), oracle(folder, CompressedTensorsConfig(dequantize=True)))
    assert len(load_file(folder / "model.safetensors")) > len(opened(folder).entries)


def opened_layer(tmp_path, tensors, quantization):
    """Return the weight of a layer, given the tensors of a file and their description."""
    save_file(
        {f"layers.0.up.{key}": value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    (entry,) = open_checkpoint(
        tmp_path, coded_format({"quantization_config": quantization, "dtype": "float32"}, "m")
    ).entries.values()
    assert entry.key == "layers.0.up.weight"
    return entry.read()


def packed(codes, bits=4, order=range(8)):
    """Return integers packed in words along the second axis, as GPTQ's and AWQ's own code does it."""
    words = torch.zeros(len(codes), codes.shape[1] * bits // 32, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= codes[:, column :: len(order)].long() << (bits * place)
    return words.to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("second", [torch.tensor(0.05), torch.tensor([0.05])])
def test_nvfp4_of_modelopt_is_decoded_as_defined(second, tmp_path):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 48), generator=generator)
    scale = (torch.rand(32, 3, generator=generator) * 400).to(torch.float8_e4m3fn)
    # A sign, two bits of exponent and one of mantissa; the lower half of a byte comes first.
    halves = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([halves, -halves])[codes]
    tensors = {"weight": (codes[:, ::2] | (codes[:, 1::2] << 4)).byte(), "weight_scale": scale}
    tensors |= {"weight_scale_2": second, "input_scale": torch.tensor(0.1)}
    decoded = opened_layer(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    expected = values * (scale.float() * second.float()).repeat_interleave(16, 1)
    # compressed-tensors computes in bfloat16.
    torch.testing.assert_close(decoded, expected, rtol=2**-8, atol=0)


def test_nvfp4_of_modelopt_is_what_compressed_tensors_converts(tmp_path):
    folder = save_few_bits("nvfp4-pack-quantized", tmp_path / "model")
    expected, tensors = logits(folder), load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("weight_packed")]:
        stem = key.removesuffix("weight_packed")
        tensors[f"{stem}weight"] = tensors.pop(key)
        tensors[f"{stem}weight_scale_2"] = 1 / tensors.pop(f"{stem}weight_global_scale")
    converter = ModelOptNvfp4Converter(targets=[r"re:.*_proj$"])
    assert sum(key.endswith("weight_packed") for key in converter.validate(dict(tensors))) > 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    torch.testing.assert_close(logits(folder), expected, rtol=1e-3, atol=1e-3)


def test_experts_of_llama_4_share_a_scale_for_each_output(tmp_path):
    folder = save_tiny_mixture("llama4", tmp_path)
    plain, stored = load_file(folder / "model.safetensors"), {}
    for key, weight in plain.items():
        if weight.ndim == 3:
            scale = weight.abs().amax(1, keepdim=True) / 448
            stored |= {key: (weight / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}
    assert {key.rpartition(".")[2] for key in stored} > {"gate_up_proj", "gate_up_proj_scale"}
    save_file(plain | stored, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, dtype="float32", quantization_config={"quant_method": "fbgemm_fp8"})
    entries = opened(folder).entries
    for key in (key for key in stored if not key.endswith("_scale")):
        expected = stored[key].float() * stored[f"{key}_scale"]
        assert torch.equal(entries[key].read(), expected)
        assert torch.equal(entries[key].row(1, "one").read(), expected[1])
    assert logits(folder).isfinite().all()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gptq_is_decoded_as_defined(version, is_ordered, tmp_path):
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (
        torch.randint(0, 16, (64, 24), generator=generator),
        torch.randint(1, 16, (4, 24), generator=generator),
    )
    scales = torch.rand(4, 24, generator=generator).half()
    group = torch.randperm(64, generator=generator) % 4 if is_ordered else torch.arange(64) // 16
    tensors = {
        "qweight": packed(codes.T).T,
        "qzeros": packed(zeros - int(version == "gptq")),
        "scales": scales,
        "g_idx": group.int(),
    }
    weight = opened_layer(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "checkpoint_format": version})
    assert torch.equal(weight, ((codes - zeros[group]) * scales[group].float()).T)


def test_awq_is_decoded_as_defined(tmp_path):
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (
        torch.randint(0, 16, (64, 24), generator=generator),
        torch.randint(0, 16, (4, 24), generator=generator),
    )
    scales, group, order = (
        torch.rand(4, 24, generator=generator).half(),
        torch.arange(64) // 16,
        (0, 2, 4, 6, 1, 3, 5, 7),
    )
    tensors = {"qweight": packed(codes, order=order), "qzeros": packed(zeros, order=order), "scales": scales}
    weight = opened_layer(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"})
    assert torch.equal(weight, ((codes - zeros[group]) * scales[group].float()).T)


def test_int8_of_bitsandbytes_is_decoded_as_defined(tmp_path):
    codes, largest = torch.arange(-64, 64).reshape(8, 16).to(torch.int8), torch.arange(1, 9).half()
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    weight = opened_layer(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    torch.testing.assert_close(weight, codes * largest.float()[:, None] / 127)


@pytest.mark.parametrize("scheme", ["fp8 deepseek_v3", "mxfp4", "pack-quantized", "nvfp4-pack-quantized"])
def test_headers_give_the_sizes_of_decoded_weights(scheme, tmp_path):
    folder = save_few_bits(scheme, tmp_path)
    checkpoint, weights = opened(folder), read_weights(folder, "m", read_settings(folder, "m"))
    tensors = [entry.read() for entry in checkpoint.entries.values()]
    assert weights.decoded_bytes == sum(tensor.nbytes for tensor in tensors)
    assert weights.parameters == sum(tensor.numel() for tensor in tensors)
    assert weights.stored_bytes == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert replace(weights, others=()) == replace(checkpoint.weights, others=())
    for entry, tensor in zip(checkpoint.entries.values(), tensors, strict=True):
        assert b"".join(entry.chunks()) == tensor.view(torch.uint8).numpy().tobytes()
