import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.layers.packing import pack_integers, unpack_integers, unpack_rows
from rocket_core.sizes.budget import packed_bytes

BITS = range(2, 9)


def packed_by_numpy(values, bits):
    """Return the documented stream of bits, from numpy's."""
    words = np.zeros(-(-len(values) // 8) * 8, dtype=np.uint8)
    words[: len(values)] = values
    stream = np.unpackbits(words[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(-1), bitorder="little")


@given(bits=st.sampled_from(BITS), n=st.integers(0, 100), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_packing_gives_the_documented_stream(bits, n, seed):
    values = np.random.default_rng(seed).integers(0, 2**bits, n, dtype=np.uint8)
    packed = pack_integers(torch.from_numpy(values), bits)
    assert packed.numpy().tobytes() == packed_by_numpy(values, bits).tobytes()
    assert len(packed) == packed_bytes(n, bits)
    assert np.array_equal(unpack_integers(packed, bits, n).numpy(), values)


@pytest.mark.parametrize("bits", BITS)
def test_every_integer_is_unpacked_in_every_place(bits):
    values = np.arange(2**bits, dtype=np.uint8).repeat(8)
    values = np.concatenate([np.roll(values, shift) for shift in range(8)])
    packed = torch.from_numpy(packed_by_numpy(values, bits))
    assert np.array_equal(unpack_integers(packed, bits, len(values)).numpy(), values)


@pytest.mark.parametrize("bits", BITS)
def test_unaligned_memory_makes_no_difference(bits):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2**bits, (41,), generator=generator, dtype=torch.uint8)
    packed = pack_integers(values, bits)
    assert torch.equal(pack_integers(torch.cat([values[:1], values])[1:], bits), packed)
    assert torch.equal(unpack_integers(torch.cat([packed[:1], packed])[1:], bits, 41), values)


def test_packing_copies_and_unpacking_8_bits_is_a_view():
    values = torch.arange(16, dtype=torch.uint8)
    packed = pack_integers(values, 8)
    values.zero_()
    unpacked = unpack_integers(packed, 8, 11)
    assert unpacked.tolist() == list(range(11))
    assert unpacked.data_ptr() == packed.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_a_gpu_packs_the_same(bits, accelerator):
    values = torch.randint(0, 2**bits, (1001,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_integers(values.to(accelerator), bits)
    assert torch.equal(packed.cpu(), pack_integers(values, bits))
    assert torch.equal(unpack_integers(packed, bits, 1001).cpu(), values)


@given(
    bits=st.sampled_from(BITS),
    rows=st.lists(st.integers(0, 6), max_size=9),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_those_of_the_whole_matrix(bits, rows, width, seed):
    values = np.random.default_rng(seed).integers(0, 2**bits, (7, width), dtype=np.uint8)
    packed = torch.from_numpy(packed_by_numpy(values.ravel(), bits))
    index = torch.tensor(rows, dtype=torch.int64)
    assert np.array_equal(unpack_rows(packed, bits, index, width).numpy(), values[rows])


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_that_does_not_exist_is_an_error(row):
    packed = pack_integers(torch.zeros(3 * 16, dtype=torch.uint8), 5)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        unpack_rows(packed, 5, torch.tensor([row]), 16)
