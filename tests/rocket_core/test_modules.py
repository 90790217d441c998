import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rocket_core.budget import factored_bytes
from rocket_core.errors import CorruptCheckpointError, RocketError
from rocket_core.modules import (
    FactorizedLinear,
    LayerFactors,
    compose_weight,
    layer_tensors,
    pack_coefficients,
    packing,
    unpack_coefficients,
)

D_IN, RANK, D_OUT = 7, 11, 5


def make_coefficients(rank, d_out, density, seed, dtype=torch.float32):
    """Random coefficients on a random support that holds exact zeros and, by chance, empty rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    support = torch.rand(rank, d_out, generator=generator) < density
    coefficients = torch.randn(rank, d_out, generator=generator, dtype=torch.float64)
    coefficients[torch.rand(rank, d_out, generator=generator) < 0.2] = 0
    return (coefficients * support).to(dtype), support


def make_layer(density=0.5, dtype=torch.float32, bias=True):
    """A packed layer and its dense weight in float64."""
    coefficients, support = make_coefficients(RANK, D_OUT, density, seed=3, dtype=dtype)
    dictionary = torch.randn(D_IN, RANK, generator=torch.Generator().manual_seed(4)).to(dtype)
    tensors = layer_tensors(LayerFactors(dictionary=dictionary, coefficients=coefficients, support=support), dtype)
    if bias:
        tensors["bias"] = torch.linspace(-1, 1, D_OUT, dtype=dtype)
    layer = FactorizedLinear(D_IN, D_OUT, rank=RANK, nnz=tensors["weight"].numel(), bias=bias, dtype=dtype)
    layer.load_state_dict(tensors)
    return layer, (dictionary.double() @ coefficients.double()).T


def as_tensors(state):
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@given(
    rank=st.integers(1, 20),
    d_out=st.integers(1, 12),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@settings(max_examples=200, deadline=None)
def test_unpacking_undoes_packing(rank, d_out, density, seed, dtype):
    coefficients, support = make_coefficients(rank, d_out, density, seed, dtype)
    packed = pack_coefficients(coefficients, support)

    assert packed.values.numel() == int(support.sum())
    assert (packed.mask is None) == bool(support.all())
    assert torch.equal(unpack_coefficients(packed.values, packed.mask, rank, d_out), coefficients)
    stored = packed.values.nbytes + (0 if packed.mask is None else packed.mask.nbytes)
    assert stored == factored_bytes(0, d_out, rank, packed.values.numel(), dtype.itemsize)


def test_values_and_bits_lie_in_the_documented_order():
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


def test_packing_copies():
    coefficients = torch.ones(1, 4)
    pack_coefficients(coefficients, None).values.zero_()
    assert coefficients.tolist() == [[1, 1, 1, 1]]


def test_a_coefficient_outside_the_support_is_refused():
    with pytest.raises(AssertionError, match="outside the support"):
        pack_coefficients(torch.ones(2, 2), torch.tensor([[True, False], [True, True]]))


def test_the_two_ways_to_read_bits_agree(monkeypatch):
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
def test_damage_is_found_and_the_layer_named(damage):
    packed = pack_coefficients(*make_coefficients(RANK, D_OUT, 0.5, seed=2))
    parts = {"values": packed.values, "mask": packed.mask}
    damage(parts)
    with pytest.raises(CorruptCheckpointError, match=r"^layers\.3\.q_proj: "):
        unpack_coefficients(**parts, rank=RANK, d_out=D_OUT, layer="layers.3.q_proj")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_composed_weight_is_the_exact_product_rounded_once(dtype):
    # Small integers: float32 is exact, a product in half precision is not.
    generator = torch.Generator().manual_seed(0)
    dictionary = torch.randint(-15, 16, (40, 30), generator=generator).to(dtype)
    coefficients = torch.randint(-15, 16, (30, 20), generator=generator).to(dtype)
    exact = (dictionary.double() @ coefficients.double()).T
    assert torch.equal(compose_weight(dictionary, coefficients, dtype), exact.to(dtype))


def test_the_product_of_half_precision_factors_is_not_rounded_to_half_precision():
    dictionary, coefficients = torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[1.0], [2**-12]]).bfloat16()
    assert compose_weight(dictionary, coefficients, torch.float32).item() == 1 + 2**-12


def test_float64_factors_are_composed_in_float64():
    dictionary, coefficients = torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[1.0], [1e-12]]).double()
    assert compose_weight(dictionary, coefficients, torch.float64).item() == 1.0 + 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_composed_weight_does_not_depend_on_the_memory_layout(dtype):
    generator = torch.Generator().manual_seed(0)
    dictionary = torch.randn(129, 77, generator=generator).to(dtype)
    coefficients = torch.randn(77, 93, generator=generator).to(dtype)
    unaligned = torch.empty(coefficients.numel() + 1, dtype=dtype)[1:].view(77, 93).copy_(coefficients)
    weight = compose_weight(dictionary, coefficients, dtype)
    assert torch.equal(compose_weight(dictionary.T.contiguous().T, coefficients.T.contiguous().T, dtype), weight)
    assert torch.equal(compose_weight(dictionary, unaligned, dtype), weight)


@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_dense_layer(density, bias):
    layer, weight = make_layer(density, torch.float64, bias)
    x = torch.randn(3, 2, D_IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = x @ weight.T + (layer.bias if bias else 0)
    packed = layer(x)
    torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.unpack_()(x), packed)


@pytest.mark.parametrize("density", [0.5, 1.0])
def test_state_dict_is_the_disk_format_in_both_states(density):
    layer, _ = make_layer(density)
    before = as_tensors(layer.state_dict())
    after = as_tensors(layer.unpack_().state_dict())
    assert set(before) == {"weight", "weight_u", "bias"} | ({"weight_mask"} if density < 1 else set())
    assert before["weight"].ndim == 1
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_loading_an_unpacked_layer_writes_into_its_parameters():
    layer, _ = make_layer()
    state = as_tensors(layer.state_dict())
    layer.unpack_()
    parameter = layer.coefficients  # an optimizer may hold it
    wanted = {name: tensor * 2 if name != "weight_mask" else tensor for name, tensor in state.items()}
    layer.load_state_dict(wanted)
    assert layer.coefficients is parameter
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in layer.state_dict().items())


def test_loading_checks_the_mask():
    layer, _ = make_layer()
    state = as_tensors(layer.state_dict())
    state["weight_mask"][0, 0] ^= 1
    layer(torch.zeros(1, D_IN))
    layer.load_state_dict(state)
    with pytest.raises(CorruptCheckpointError):
        layer(torch.zeros(1, D_IN))
    with pytest.raises(CorruptCheckpointError):
        make_layer()[0].unpack_().load_state_dict(state)


def test_weight_of_an_unpacked_layer_reads_as_dense():
    layer, weight = make_layer(dtype=torch.float32)
    layer.unpack_()
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((D_OUT, D_IN), torch.float32, "cpu")
    assert torch.equal(layer.weight + 0, layer.dense_weight())
    torch.testing.assert_close(layer.weight @ torch.eye(D_IN), weight.float())
    torch.testing.assert_close(torch.cat([layer.weight, layer.weight])[D_OUT:], weight.float())


def write_in_place(layer):
    layer.weight.add_(1)


def write_as_output(layer):
    torch.add(torch.ones(D_OUT, D_IN), 1, out=layer.weight)


def write_data(layer):
    layer.weight.data += 1


def write_attribute(layer):
    layer.weight = nn.Parameter(torch.ones(D_OUT, D_IN))


@pytest.mark.parametrize("write", [write_in_place, write_as_output, write_data, write_attribute])
def test_weight_of_an_unpacked_layer_is_not_written(write):
    layer, _ = make_layer()
    layer.unpack_()
    with pytest.raises(RocketError, match="dequantize"):
        write(layer)


@pytest.mark.parametrize("prepare", [lambda layer: layer.unpack_(), lambda layer: copy.deepcopy(layer.unpack_())])
def test_training_keeps_the_support(prepare):
    layer = prepare(make_layer()[0])
    support = packing.unpack_bits(layer.weight_mask, RANK)
    zeros_inside = support & (layer.coefficients == 0)
    optimizer = torch.optim.AdamW((p for p in layer.parameters() if p.requires_grad), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(4, D_IN)).square().sum().backward()
        optimizer.step()
    assert (layer.coefficients[~support] == 0).all()
    assert zeros_inside.any()
    assert (layer.coefficients[zeros_inside] != 0).all()
    assert layer.state_dict()["weight"].numel() == layer.nnz


def test_both_states_have_the_same_gradients():
    packed, unpacked = make_layer(dtype=torch.float64)[0], make_layer(dtype=torch.float64)[0].unpack_()
    x = torch.randn(4, D_IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer in (packed, unpacked):
        layer(x).square().sum().backward()
    support = packing.unpack_bits(unpacked.weight_mask, RANK)
    torch.testing.assert_close(unpacked.coefficients.grad[support], packed.weight.grad)
    torch.testing.assert_close(unpacked.weight_u.grad, packed.weight_u.grad)


def test_casting_leaves_the_mask_alone():
    layer, _ = make_layer()
    mask = layer.weight_mask.clone()
    layer.unpack_().to(torch.bfloat16)
    assert layer(torch.zeros(1, D_IN, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(layer.weight_mask, mask)


def test_says_what_it_is():
    layer, _ = make_layer()
    assert repr(layer) == (
        f"FactorizedLinear(in_features={D_IN}, out_features={D_OUT}, rank={RANK}, nnz={layer.nnz}, "
        "bias=True, packed=True)"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_computes_the_same():
    layer, weight = make_layer(dtype=torch.float64)
    layer.cuda()
    x = torch.randn(3, D_IN, dtype=torch.float64, device="cuda")
    expected = x @ weight.T.cuda() + layer.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.unpack_()(x), expected)
    torch.testing.assert_close(layer.weight + 0, weight.cuda())
