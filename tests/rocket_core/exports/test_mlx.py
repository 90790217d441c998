"""Layers packed for MLX, next to a reader written from its documentation, and to MLX itself."""

import numpy as np
import pytest
import torch

from rocket_core.checkpoint.reader import DTYPES
from rocket_core.errors import CheckpointFormatError
from rocket_core.exports.gguf_blocks import pack_blocks, unpack_blocks
from rocket_core.exports.mlx import dense_weights, model_settings, part_shapes, plan_layer
from rocket_core.linalg.block_rounding import round_to_blocks
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import RoundingGram, round_to_nearest
from rocket_core.sizes.block_types import BLOCK_FORMATS, MLX_TYPES

SHAPE = (256, 6)


def rounded(block_type):
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) + 0.3
    scales = search_block_scales(weight, torch.ones(SHAPE[0]), BLOCK_FORMATS[block_type])
    return weight, round_to_nearest(weight, scales)


def tensors_of(block_type, blocks):
    plans = plan_layer("layer.", SHAPE, block_type, lambda: pack_blocks(blocks))
    return {
        plan.key: torch.frombuffer(bytearray(b"".join(plan.chunks())), dtype=DTYPES[plan.dtype]).view(plan.shape)
        for plan in plans
    }


def read_by_documentation(tensors, bits, size):
    """Return the rows: codes follow each other from the lowest bit of a row's bytes; w = scale · code + bias."""
    row_bits = np.unpackbits(tensors["layer.weight"].numpy().view(np.uint8), axis=1, bitorder="little")
    codes = row_bits.reshape(SHAPE[1], -1, size, bits) @ (2 ** np.arange(bits))
    scales, biases = (tensors[f"layer.{part}"].float().numpy()[:, :, None] for part in ("scales", "biases"))
    return (scales * codes + biases).reshape(SHAPE[1], -1)


@pytest.mark.parametrize("block_type", MLX_TYPES)
def test_the_layout_is_the_documented_one(block_type):
    bits, size = map(int, block_type.removeprefix("affine").split("_"))
    weight, blocks = rounded(block_type)
    tensors = tensors_of(block_type, blocks)
    shapes = {f"layer.{part}": stored for part, stored in part_shapes(SHAPE, block_type).items()}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == shapes
    assert sum(tensor.nbytes for tensor in tensors.values()) == BLOCK_FORMATS[block_type].stored_bytes(*SHAPE)
    rows = read_by_documentation(tensors, bits, size)
    assert np.allclose(rows, blocks.rows(torch.float32).numpy(), atol=1e-6)
    # Groups span 8 at most; rounding to nearest has an error of a step over the root of 12.
    assert np.sqrt(np.square(rows - weight.T.numpy()).mean()) < 8 / (2**bits - 1) / 12**0.5


@pytest.mark.parametrize("block_type", MLX_TYPES)
def test_reading_returns_what_was_written(block_type):
    _, blocks = rounded(block_type)
    assert torch.equal(unpack_blocks(pack_blocks(blocks), block_type).codes, blocks.codes)
    settings = model_settings({"layer": block_type})
    assert settings["quantization"] == settings["quantization_config"]
    dense = dense_weights(settings["quantization"], tensors_of(block_type, blocks))
    assert list(dense) == ["layer.weight"]
    assert torch.equal(dense["layer.weight"], blocks.rows(torch.float32))


def test_settings_without_values_mean_defaults():
    # As mlx-lm's recipes of mixed bits write them.
    _, blocks = rounded("affine2_64")
    settings = {"group_size": 32, "bits": 4, "layer": {"group_size": None, "bits": 2, "mode": "affine"}}
    dense = dense_weights(settings, tensors_of("affine2_64", blocks))
    assert torch.equal(dense["layer.weight"], blocks.rows(torch.float32))


def test_a_model_with_dense_layers_only_has_no_settings():
    assert model_settings({}) == {}


@pytest.mark.parametrize("block_type", ["affine8_64", "affine4_64", "affine2_32"])
def test_descent_reduces_the_error_of_the_output(block_type):
    weight, nearest = rounded(block_type)
    inputs = torch.randn(512, SHAPE[0], generator=torch.Generator().manual_seed(1)) @ torch.randn(
        SHAPE[0], SHAPE[0], generator=torch.Generator().manual_seed(2)
    )
    gram = RoundingGram.of(inputs.T @ inputs)
    found = round_to_blocks(weight, gram, BLOCK_FORMATS[block_type])[0]

    def error(blocks):
        return (inputs @ (weight - blocks.weight(torch.float32))).square().sum()

    assert error(found) < 0.5 * error(nearest)


@pytest.mark.parametrize("block_type", MLX_TYPES)
def test_mlx_reads_the_same_weights(block_type):
    mx = pytest.importorskip("mlx.core", reason="MLX is needed: pip install mlx-cpu mlx")
    bits, size = map(int, block_type.removeprefix("affine").split("_"))
    _, blocks = rounded(block_type)
    tensors = tensors_of(block_type, blocks)
    scales, biases = (mx.array(tensors[f"layer.{part}"].float().numpy()) for part in ("scales", "biases"))
    rows = mx.dequantize(mx.array(tensors["layer.weight"].numpy()), scales, biases, group_size=size, bits=bits)
    assert np.allclose(np.array(rows), blocks.rows(torch.float32).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"bits": 7, "group_size": 64}, ("weight", "scales", "biases")),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, ("weight", "scales")),
        ({}, ("weight", "scales", "biases")),
    ],
    ids=["bits", "no offsets", "nothing said"],
)
def test_other_codes_are_refused(settings, parts):
    with pytest.raises(CheckpointFormatError, match="layer some is stored for MLX in a way that Rocket does not read"):
        dense_weights(settings, {f"some.{part}": torch.zeros(1, 1) for part in parts})
