import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.exports.gguf_blocks import pack_blocks, unpack_blocks
from rocket_core.linalg.block_codes import BlockScales, BlockWeight
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.sizes.block_types import BLOCK_FORMATS, BLOCK_TYPES
from tests.reference.llama_cpp import dequantize, quantize


def any_block_weight(block_format, blocks, d_out, seed):
    """Return a weight whose codes and scales are any that can be stored."""
    random = np.random.default_rng(seed)
    d_in = blocks * block_format.block_size
    groups = blocks * block_format.groups_per_block
    # All finite float16 numbers are as likely.
    halves = random.integers(0, 0x7C00, (2, blocks, d_out)) + 0x8000 * random.integers(0, 2, (2, blocks, d_out))
    halves = halves.astype(np.uint16).view(np.float16)
    scales = random.integers(block_format.scales[0], block_format.scales[1], (groups, d_out), endpoint=True)
    least = int(block_format.groups_per_block == 1)
    minima = random.integers(least, max(least, block_format.largest_minimum), (groups, d_out), endpoint=True)
    codes = random.choice(block_format.levels, (d_in, d_out))
    return BlockWeight(
        codes=torch.from_numpy(codes.astype(np.int8)),
        scales=BlockScales(
            block_scales=torch.from_numpy(halves[0]),
            group_scales=torch.from_numpy(scales.astype(np.int8)),
            block_minima=torch.from_numpy(halves[1]) if block_format.has_minima else None,
            group_minima=torch.from_numpy(minima.astype(np.int8)) if block_format.has_minima else None,
            format=block_format,
        ),
    )


@pytest.mark.parametrize("name", BLOCK_TYPES)
@settings(max_examples=10, deadline=None)
@given(blocks=st.integers(1, 3), d_out=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_the_bytes_are_read_bit_for_bit(name, blocks, d_out, seed):
    rounded = any_block_weight(BLOCK_FORMATS[name], blocks, d_out, seed)
    packed = pack_blocks(rounded)
    assert packed.shape == (d_out, BLOCK_FORMATS[name].row_bytes(len(rounded.codes)))
    rows = rounded.rows(torch.float32).numpy()
    assert np.array_equal(dequantize(packed.numpy(), name).view(np.int32), rows.view(np.int32))


@pytest.mark.parametrize("name", BLOCK_TYPES)
@settings(max_examples=10, deadline=None)
@given(blocks=st.integers(1, 3), d_out=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_unpacking_returns_what_was_packed(name, blocks, d_out, seed):
    rounded = any_block_weight(BLOCK_FORMATS[name], blocks, d_out, seed)
    unpacked = unpack_blocks(pack_blocks(rounded), name)
    assert torch.equal(unpacked.codes, rounded.codes)
    for part in ("block_scales", "group_scales", "block_minima", "group_minima"):
        left, right = getattr(unpacked.scales, part), getattr(rounded.scales, part)
        assert right is None if left is None else torch.equal(left, right)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_files_of_llama_cpp_are_read_and_written(name):
    rows = np.random.default_rng(1).standard_normal((5, 512))
    packed = quantize(rows, name, np.ones(512) if name == "Q2_K" else None)
    unpacked = unpack_blocks(torch.from_numpy(packed), name)
    assert np.array_equal(unpacked.rows(torch.float32).numpy(), dequantize(packed, name))
    assert np.array_equal(pack_blocks(unpacked).numpy(), packed)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-4, 1.0, 1e4, 1e12])
def test_weights_of_any_size_are_stored_as_finite(name, scale):
    weight = scale * torch.randn(256, 3, generator=torch.Generator().manual_seed(2))
    weight[:, 1] = 0
    scales = search_block_scales(weight, torch.ones(256), BLOCK_FORMATS[name])
    rounded = round_to_nearest(weight, scales)
    read = dequantize(pack_blocks(rounded).numpy(), name)
    assert np.isfinite(read).all()
    assert np.array_equal(read, rounded.rows(torch.float32).numpy())
    if scale == 1.0:
        assert np.abs(read[1]).max() < 1e-6
