import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.errors import CorruptCheckpointError
from rocket_core.layers import pack_coefficients, packing, unpack_coefficients
from tests.reference.stored_layers import D_OUT, RANK, make_coefficients


@given(
    rank=st.integers(1, 20),
    d_out=st.integers(1, 12),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    always_masked=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_unpacking_reverses_packing(rank, d_out, density, seed, dtype, always_masked):
    coefficients, support = make_coefficients(rank, d_out, density, seed, dtype)
    packed = pack_coefficients(coefficients, support, always_masked=always_masked)

    assert packed.values.numel() == int(support.sum())
    assert (packed.mask is None) == (bool(support.all()) and not always_masked)
    assert torch.equal(unpack_coefficients(packed.values, packed.mask, rank, d_out), coefficients)


def test_values_and_bits_are_in_the_documented_order():
    coefficients, support = make_coefficients(RANK, D_OUT, 0.5, seed=1)
    packed = pack_coefficients(coefficients, support)

    values = [coefficients[i, j].item() for j in range(D_OUT) for i in range(RANK) if support[i, j]]
    mask = np.zeros((D_OUT, math.ceil(RANK / 8)), dtype=np.uint8)
    for j in range(D_OUT):
        for i in range(RANK):
            mask[j, i // 8] |= int(support[i, j]) << (i % 8)
    assert packed.values.tolist() == values
    assert packed.mask.tolist() == mask.tolist()


def test_without_support_every_coefficient_is_stored():
    coefficients, _ = make_coefficients(RANK, D_OUT, 0.5, seed=1)
    packed = pack_coefficients(coefficients, None)
    assert packed.mask is None
    assert packed.values.tolist() == coefficients.T.flatten().tolist()
    masked = pack_coefficients(coefficients, None, always_masked=True)
    assert masked.values.tolist() == packed.values.tolist()
    assert masked.mask.tolist() == [[0b11111111, 0b111]] * D_OUT


def test_packing_copies_its_input():
    coefficients = torch.ones(1, 4)
    pack_coefficients(coefficients, None).values.zero_()
    assert coefficients.tolist() == [[1, 1, 1, 1]]


def test_a_coefficient_outside_the_support_is_refused():
    with pytest.raises(AssertionError, match="outside the support"):
        pack_coefficients(torch.ones(2, 2), torch.tensor([[True, False], [True, True]]))


def test_both_ways_to_unpack_bits_agree(monkeypatch):
    mask = torch.arange(256, dtype=torch.uint8).view(64, 4)
    fast = packing.unpack_bits(mask, 29)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(packing.unpack_bits(mask, 29), fast)


def flip_bit(packed):
    packed["mask"][2, 0] ^= 1


def set_padding_bit(packed):
    packed["mask"][1, -1] |= 1 << (RANK % 8)


def lose_value(packed):
    packed["values"] = packed["values"][:-1]


def lose_mask(packed):
    packed["mask"] = None


def widen_mask(packed):
    packed["mask"] = torch.nn.functional.pad(packed["mask"], (0, 1))


@pytest.mark.parametrize("damage", [flip_bit, set_padding_bit, lose_value, lose_mask, widen_mask])
def test_damage_is_detected_and_the_layer_named(damage):
    packed = pack_coefficients(*make_coefficients(RANK, D_OUT, 0.5, seed=2))
    parts = {"values": packed.values, "mask": packed.mask}
    damage(parts)
    with pytest.raises(CorruptCheckpointError, match=r"^layers\.3\.q_proj: "):
        unpack_coefficients(**parts, rank=RANK, d_out=D_OUT, layer="layers.3.q_proj")
