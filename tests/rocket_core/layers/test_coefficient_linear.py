import copy

import pytest
import torch
from torch import nn

from rocket_core.errors import CorruptCheckpointError, RocketError
from rocket_core.layers import packing
from tests.reference.stored_layers import ALL_KINDS, D_IN, D_OUT, KINDS, QUANTIZED, as_tensors, make_layer

PARTS = {
    "factored": {"weight", "weight_mask", "weight_u", "bias"},
    "low rank": {"weight", "weight_u", "bias"},
    "follower": {"weight", "weight_mask", "bias"},
    "sparse": {"weight", "weight_mask", "bias"},
    "full": {"weight", "weight_mask", "bias"},
} | {kind: {"weight", "weight_scale", "bias"} for kind in QUANTIZED}
MASKED = [kind for kind, parts in PARTS.items() if "weight_mask" in parts]


def to_all(layer, dtype):
    """Cast a layer, and its owner if it has one."""
    getattr(layer, "dictionary_owner", layer).to(dtype)
    return layer.to(dtype)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_equals_the_dense_layer(kind, bias):
    layer, weight = make_layer(kind, torch.float64, bias=bias)
    x = torch.randn(3, 2, D_IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = x @ weight.T + (layer.bias if bias else 0)
    packed = layer(x)
    torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.unpack_()(x), packed)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_state_dict_is_the_disk_format_in_both_states(kind):
    layer, _ = make_layer(kind)
    before = as_tensors(layer.state_dict())
    after = as_tensors(layer.unpack_().state_dict())
    assert set(before) == PARTS[kind]
    assert before["weight"].ndim == 1
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_an_unpacked_layer_writes_into_its_parameters(kind):
    layer, _ = make_layer(kind)
    state = as_tensors(layer.state_dict())
    layer.unpack_()
    parameter = layer.coefficients  # an optimizer may hold it
    wanted = {name: tensor * 2 if name != "weight_mask" else tensor for name, tensor in state.items()}
    layer.load_state_dict(wanted)
    assert layer.coefficients is parameter
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("kind", MASKED)
def test_loading_checks_the_mask(kind):
    layer, _ = make_layer(kind)
    state = as_tensors(layer.state_dict())
    state["weight_mask"][0, 0] ^= 1
    layer(torch.zeros(1, D_IN))
    layer.load_state_dict(state)
    with pytest.raises(CorruptCheckpointError):
        layer(torch.zeros(1, D_IN))
    with pytest.raises(CorruptCheckpointError):
        make_layer(kind)[0].unpack_().load_state_dict(state)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_weight_of_an_unpacked_layer_is_dense(kind):
    layer, weight = make_layer(kind)
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


@pytest.mark.parametrize("kind", ["factored", "int4"])
@pytest.mark.parametrize("write", [write_in_place, write_as_output, write_data, write_attribute])
def test_the_weight_of_an_unpacked_layer_cannot_be_written(kind, write):
    layer, _ = make_layer(kind)
    layer.unpack_()
    with pytest.raises(RocketError, match="dequantize"):
        write(layer)


@pytest.mark.parametrize("prepare", [lambda layer: layer.unpack_(), lambda layer: copy.deepcopy(layer.unpack_())])
@pytest.mark.parametrize("kind", ["factored", "follower", "sparse"])
def test_training_keeps_the_support(kind, prepare):
    layer = prepare(make_layer(kind)[0])
    support = packing.unpack_bits(layer.weight_mask, layer.width)
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


@pytest.mark.parametrize("kind", ["factored", "follower", "sparse"])
def test_both_states_have_the_same_gradients(kind):
    packed, unpacked = make_layer(kind, torch.float64)[0], make_layer(kind, torch.float64)[0].unpack_()
    x = torch.randn(4, D_IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer in (packed, unpacked):
        layer(x).square().sum().backward()
    support = packing.unpack_bits(unpacked.weight_mask, unpacked.width)
    torch.testing.assert_close(unpacked.coefficients.grad[support], packed.weight.grad)
    if kind != "sparse":
        torch.testing.assert_close(unpacked.dictionary_owner.weight_u.grad, packed.dictionary_owner.weight_u.grad)


@pytest.mark.parametrize("kind", MASKED)
def test_casting_does_not_change_the_mask(kind):
    layer, _ = make_layer(kind)
    mask = layer.weight_mask.clone()
    to_all(layer.unpack_(), torch.bfloat16)
    assert layer(torch.zeros(1, D_IN, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(layer.weight_mask, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_weight_is_rounded_once(kind):
    layer, weight = make_layer(kind, torch.float64)
    assert torch.equal(layer.dense_weight(torch.bfloat16), layer.dense_weight().bfloat16())
    assert torch.equal(layer.unpack_().dense_weight(torch.bfloat16), layer.dense_weight().bfloat16())
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=1e-14, atol=1e-14)
    layer.dense_weight().zero_()
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("factored", "FactorizedLinear(in_features=7, out_features=5, rank=11, nnz={}, bias=True, packed=True)"),
        (
            "follower",
            "FactorizedLinear(in_features=7, out_features=5, rank=11, nnz={}, bias=True, packed=True, "
            "dictionary of this layer)",
        ),
        ("sparse", "SparseLinear(in_features=7, out_features=5, nnz={}, bias=True, packed=True)"),
        (
            "int4",
            "QuantizedLinear(in_features=7, out_features=5, bits=4, group_size=3, scale_bits=6, bias=True, "
            "packed=True)",
        ),
    ],
)
def test_the_repr_describes_the_layer(kind, expected):
    layer, _ = make_layer(kind)
    assert repr(layer) == expected.format(getattr(layer, "nnz", None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_gpu_computes_the_same(kind, accelerator):
    layer, weight = make_layer(kind, torch.float64)
    getattr(layer, "dictionary_owner", layer).to(accelerator)
    layer.to(accelerator)
    x = torch.randn(3, D_IN, dtype=torch.float64, device=accelerator)
    expected = x @ weight.T.to(accelerator) + layer.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.unpack_()(x), expected)
    torch.testing.assert_close(layer.weight + 0, weight.to(accelerator))
