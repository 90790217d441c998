"""Layers packed for Olive, next to a reader written from the documentation of `MatMulNBits`."""

import numpy as np
import pytest
import torch

from rocket_core.checkpoint.reader import DTYPES
from rocket_core.engines import ONNX
from rocket_core.errors import CheckpointFormatError
from rocket_core.exports.olive import dense_weights, part_shapes, plan_layer, quantization_config
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes.code_format import formats_for

SHAPE = (256, 6)
FORMATS = formats_for(SHAPE[0], ONNX.codes)


def rounded_weight(code_format):
    draw = torch.Generator().manual_seed(0)
    half = 2 ** (code_format.bits - 1)
    codes = torch.randint(-half, half, SHAPE, generator=draw, dtype=torch.int8)
    values = torch.randn(code_format.groups(SHAPE[0]), SHAPE[1], generator=draw) * 0.01
    return RoundedWeight(codes=codes, scales=Scales.nearest(values, 0, code_format))


def tensors_of(rounded, dtype):
    plans = plan_layer("layer.", SHAPE, rounded.scales.format, dtype, lambda: rounded)
    return {
        plan.key: torch.frombuffer(bytearray(b"".join(plan.chunks())), dtype=DTYPES[plan.dtype]).view(plan.shape)
        for plan in plans
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code_format", FORMATS, ids=lambda found: f"{found.bits}-{found.group_size}")
def test_the_layout_is_the_documented_one(code_format, dtype):
    """B is [N][blocks][bytes of a block], bits from the lowest of a byte on; w = scale · (code - 2^(bits - 1))."""
    rounded, bits, size = rounded_weight(code_format), code_format.bits, code_format.group_size
    tensors = tensors_of(rounded, dtype)
    shapes = {f"layer.{part}": stored for part, stored in part_shapes(SHAPE, code_format, dtype).items()}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == shapes
    assert sum(tensor.nbytes for tensor in tensors.values()) == code_format.stored_bytes(*SHAPE)
    stream = np.unpackbits(tensors["layer.qweight"].numpy(), axis=1, bitorder="little")
    codes = stream.reshape(SHAPE[1], -1, size, bits) @ (2 ** np.arange(bits)) - 2 ** (bits - 1)
    weight = tensors["layer.scales"].float().numpy()[:, :, None] * codes
    assert np.array_equal(weight.reshape(SHAPE[1], -1), rounded.rows(torch.float32).numpy())


@pytest.mark.parametrize("code_format", FORMATS, ids=lambda found: f"{found.bits}-{found.group_size}")
def test_reading_returns_what_was_written(code_format):
    rounded = rounded_weight(code_format)
    norm = torch.ones(3)
    dense = dense_weights(
        quantization_config({"layer": code_format}), {**tensors_of(rounded, torch.bfloat16), "norm.weight": norm}
    )
    assert torch.equal(dense.pop("layer.weight"), rounded.rows(torch.float32))
    assert list(dense) == ["norm.weight"]


def test_layers_without_settings_have_those_of_the_model():
    rounded = rounded_weight(next(one for one in FORMATS if one.bits == 4))
    dense = dense_weights(quantization_config({}), tensors_of(rounded, torch.bfloat16))
    assert torch.equal(dense["layer.weight"], rounded.rows(torch.float32))


@pytest.mark.parametrize("settings", [{"bits": 3}, {}], ids=["bits", "nothing said"])
def test_other_codes_are_refused(settings):
    tensors = {"some.qweight": torch.zeros(1, 4, dtype=torch.uint8), "some.scales": torch.zeros(1, 1)}
    with pytest.raises(CheckpointFormatError, match="layer some is stored for Olive in a way that"):
        dense_weights(settings, tensors)
    with pytest.raises(CheckpointFormatError, match="without zero points"):
        dense_weights({"bits": 4}, {**tensors, "some.qzeros": torch.zeros(1, 1)})


def test_groups_are_powers_of_two():
    assert {one.bits for one in FORMATS} == {2, 4, 8}
    assert {one.group_size for one in FORMATS} == {32, 64, 128}
    assert {one.group_size for one in formats_for(896, ONNX.codes)} == {32, 64, 128}
    assert {one.group_size for one in formats_for(576, ONNX.codes)} == {32, 64}
