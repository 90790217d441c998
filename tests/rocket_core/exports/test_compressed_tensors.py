"""The tensors of compressed-tensors, against the package's own compressor."""

from dataclasses import replace

import pytest
import torch

from rocket_core.engines import VLLM
from rocket_core.exports.compressed_tensors import plan_layer, quantization_config
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes.code_format import formats_for

ct = pytest.importorskip("compressed_tensors")
SHAPE = (256, 24)
FORMATS = formats_for(SHAPE[0], VLLM.codes)


def rounded_weight(code_format, seed=0):
    draw = torch.Generator().manual_seed(seed)
    half = 2 ** (code_format.bits - 1)
    codes = torch.randint(-half, half, SHAPE, generator=draw, dtype=torch.int8)
    values = torch.randn(code_format.groups(SHAPE[0]), SHAPE[1], generator=draw) * 0.01
    return RoundedWeight(codes=codes, scales=Scales.nearest(values, 0, code_format))


def tensors_of(rounded, dtype):
    plans = plan_layer("layer.", SHAPE, rounded.scales.format, dtype, lambda: rounded)
    dtypes = {"I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16}
    return {
        plan.key: torch.frombuffer(bytearray(b"".join(plan.chunks())), dtype=dtypes[plan.dtype]).view(plan.shape)
        for plan in plans
    }


def scheme_of(code_format):
    from compressed_tensors.quantization import QuantizationScheme

    config = quantization_config({"layer": (code_format, SHAPE[0])}, [])
    [group] = config["config_groups"].values()
    return QuantizationScheme.model_validate(group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code_format", FORMATS, ids=lambda found: f"{found.bits}-{found.group_size}")
class TestAgainstThePackage:
    def test_its_decompressor_returns_our_reconstruction(self, code_format, dtype):
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

        rounded = rounded_weight(code_format)
        stored = {key.removeprefix("layer."): tensor for key, tensor in tensors_of(rounded, dtype).items()}
        theirs = PackedQuantizationCompressor.decompress(stored, scheme_of(code_format))["weight"]
        assert theirs.dtype == dtype
        assert torch.equal(theirs, rounded.rows(dtype))

    def test_its_compressor_writes_the_same_bytes(self, code_format, dtype):
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

        rounded = rounded_weight(code_format, seed=1)
        ours = tensors_of(rounded, dtype)
        dense = {"weight": rounded.rows(torch.float32), "weight_scale": ours["layer.weight_scale"].float()}
        theirs = PackedQuantizationCompressor.compress(dense, scheme_of(code_format))
        assert torch.equal(theirs["weight_packed"], ours["layer.weight_packed"])
        assert theirs["weight_shape"].tolist() == ours["layer.weight_shape"].tolist()


@pytest.mark.parametrize("code_format", FORMATS, ids=lambda found: f"{found.bits}-{found.group_size}")
def test_scales_are_exact_in_both_dtypes(code_format):
    values = torch.randn(code_format.groups(SHAPE[0]), SHAPE[1]).exp() * 1e-3
    exact = Scales.nearest(values, 0, code_format).values(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(exact.to(dtype).float(), exact)
    assert ((exact - values).abs() <= 2**-8 * values.abs()).all()
    finer = Scales.nearest(values, 0, replace(code_format, bfloat16_scales=False)).values(torch.float32)
    assert (finer - values).abs().sum() < (exact - values).abs().sum()


def test_experts_are_named_by_one_pattern():
    code_format = next(found for found in FORMATS if (found.bits, found.group_size) == (4, 128))
    experts = {f"mlp.experts.{number}.{part}_proj" for number in range(3) for part in ("up", "down")}
    # A group of 128 inputs is the whole output of one projection, and half of the other's.
    formats = {name: (code_format, 128 if "up" in name else 256) for name in sorted(experts)}
    config = quantization_config(formats | {"q_proj": (code_format, 256)}, ["mlp.gate"], experts=experts)
    [group] = config["config_groups"].values()
    assert group["targets"] == ["q_proj", r"re:.*\.experts\..*"]
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("group", 128)
    assert config["ignore"] == ["mlp.gate"]
    dense = quantization_config({"q_proj": (code_format, 256)}, ["mlp.gate", *sorted(experts)], experts=experts)
    assert dense["ignore"] == ["mlp.gate", r"re:.*\.experts\..*"]


def test_groups_of_more_bits_come_first():
    formats = {f"layer{number}": (code_format, SHAPE[0]) for number, code_format in enumerate(FORMATS)}
    config = quantization_config(formats, ["lm_head"])
    bits = [group["weights"]["num_bits"] for group in config["config_groups"].values()]
    assert bits == sorted(bits, reverse=True)
    assert set(bits) == {4, 8}
    assert config["ignore"] == ["lm_head"]
    targets = [name for group in config["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(formats)
