import copy
import pickle

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rocket_core.errors import CorruptCheckpointError, RocketError
from rocket_core.layers import QuantizedLinear, layer_tensors, row_layout
from rocket_core.sizes.code_format import CODE_BITS, CodeFormat
from tests.reference.stored_layers import (
    D_IN,
    D_OUT,
    EXPONENT,
    QUANTIZED,
    as_tensors,
    make_layer,
    make_rounded,
    rounded_weight,
)

KINDS = pytest.mark.parametrize("kind", QUANTIZED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def expected_of(rounded, x, bias):
    """Return the layer's result in float64."""
    product = x.double() @ rounded_weight(rounded).T
    return product if bias is None else product + bias.double()


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_rounded_once_to_the_dtype(kind, dtype, bias, monkeypatch):
    monkeypatch.setattr(row_layout, "multiplies_bfloat16", lambda: False)
    layer = make_layer(kind, dtype, bias=bias)[0].tabulate_()
    rounded = make_rounded(QUANTIZED[kind])
    for shape in ((D_IN,), (0, D_IN), (1, D_IN), (2, 3, D_IN), (30, D_IN)):
        x = inputs(*shape, dtype=dtype)
        result = layer(x)
        assert result.dtype == dtype
        expected = expected_of(rounded, x, layer.bias)
        assert result.shape == expected.shape
        half_a_unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(result.double(), expected, rtol=1.01 * half_a_unit, atol=1e-5)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("group_size", "scale_bits"), [(8, 6), (16, 6), (32, 8), (64, 16), (96, 16)])
def test_the_kernels_are_used_for_every_format(bits, group_size, scale_bits):
    code_format = CodeFormat(bits=bits, group_size=group_size, scale_bits=scale_bits)
    rounded = make_rounded(code_format, 96, 40)
    layer = QuantizedLinear(96, 40, code_format=code_format, scale_exponent=EXPONENT, dtype=torch.bfloat16)
    layer.load_state_dict(layer_tensors(rounded, torch.bfloat16))
    x = inputs(2, 96, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = layer.prepare_()(x)
    calls = {event.key: event.count for event in profiled.key_averages()}
    torch.testing.assert_close(result, expected_of(rounded, x, None).bfloat16(), rtol=2**-7, atol=1e-4)
    assert "aten::mm" not in calls
    assert "aten::addmm" not in calls


@KINDS
def test_the_state_dict_is_that_of_the_packed_layer(kind):
    layer = make_layer(kind)[0]
    before = as_tensors(layer.state_dict())
    for change in (layer.tabulate_, layer.bfloat16, layer.float, layer.unpack_, layer.tabulate_, layer.double):
        change()
        state = layer.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(before[name], tensor) for name, tensor in state.items() if name != "bias")
    assert not layer.tabulated
    assert not layer.packed


@KINDS
def test_casting_keeps_the_scales(kind):
    layer = make_layer(kind, torch.float32, bias=False)[0].tabulate_()
    before = layer(torch.eye(D_IN))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer.to(dtype)
        assert layer.tabulated
        assert torch.equal(layer(torch.eye(D_IN, dtype=dtype)), before.to(dtype))
    layer.double()
    assert not layer.tabulated
    torch.testing.assert_close(layer(torch.eye(D_IN).double()), rounded_weight(make_rounded(QUANTIZED[kind])).T)
    with pytest.raises(RocketError, match="float64"):
        layer.tabulate_()


def test_casting_keeps_the_table():
    code_format = CodeFormat(bits=4, group_size=32, scale_bits=8)
    rounded = make_rounded(code_format, 64, 40)
    layer = QuantizedLinear(64, 40, code_format=code_format, scale_exponent=EXPONENT, dtype=torch.bfloat16)
    layer.load_state_dict(layer_tensors(rounded, torch.bfloat16))
    state, x = as_tensors(layer.state_dict()), inputs(2, 64, dtype=torch.bfloat16)
    packed = in_memory(layer) + layer.preparing_bytes_on_cpu
    brief = layer.tabulate_()(x)
    assert in_memory(layer) == packed
    for change, dtype in ((layer.float, torch.float32), (layer.half, torch.float16), (layer.bfloat16, torch.bfloat16)):
        change()
        assert layer.tabulated
        expected = expected_of(rounded, x, None)
        torch.testing.assert_close(layer(x.to(dtype)).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert all(torch.equal(state[name], tensor) for name, tensor in layer.state_dict().items())
    assert torch.equal(layer(x), brief)
    layer.load_state_dict(layer_tensors(make_rounded(code_format, 64, 40, seed=9), torch.bfloat16))
    assert not torch.equal(layer(x), brief)
    layer.load_state_dict(state)
    assert torch.equal(layer(x), brief)
    assert torch.equal(layer.unpack_().dense, rounded.rows(torch.bfloat16))


@KINDS
def test_the_dense_weight_is_exact(kind):
    layer = make_layer(kind)[0].tabulate_()
    rounded = make_rounded(QUANTIZED[kind])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(layer.dense_weight(dtype), rounded.rows(dtype))
    assert torch.equal(layer.unpack_().dense, rounded.rows(torch.float32))


@KINDS
def test_loading_replaces_the_table(kind):
    layer = make_layer(kind)[0].tabulate_()
    parameter, other = layer.stored, make_rounded(QUANTIZED[kind], seed=9)
    state = layer_tensors(other, torch.float32) | {"bias": torch.zeros(D_OUT)}
    layer.load_state_dict(state)
    assert layer.stored is parameter
    torch.testing.assert_close(layer(torch.eye(D_IN)), other.weight(torch.float32), rtol=1e-6, atol=0)
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


def test_damaged_tensors_are_refused():
    layer = make_layer("int3")[0]
    before = as_tensors(layer.state_dict())
    damaged = as_tensors(before)
    damaged["weight_scale"].view(torch.float16)[2] = float("nan")
    layer.load_state_dict(damaged)
    with pytest.raises(CorruptCheckpointError, match="a scale is zero or not finite"):
        layer.tabulate_()
    assert layer.packed
    layer.load_state_dict(before)
    layer.tabulate_()
    with pytest.raises(CorruptCheckpointError, match="a scale is zero or not finite"):
        layer.load_state_dict(damaged)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


@KINDS
def test_copies_are_independent(kind):
    layer, x = make_layer(kind)[0].tabulate_(), torch.eye(D_IN)
    twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))  # noqa: S301 (own bytes)
    before = layer(x)
    layer.load_state_dict(layer_tensors(make_rounded(QUANTIZED[kind], seed=9), torch.float32), strict=False)
    assert not torch.equal(layer(x), before)
    assert all(torch.equal(twin(x), before) for twin in twins)


def test_the_meta_device_and_back():
    layer = make_layer("int4", torch.bfloat16, bias=False)[0].tabulate_()
    state, before = as_tensors(layer.state_dict()), layer(torch.eye(D_IN).bfloat16())
    layer.to("meta")
    assert layer.offloaded
    assert not layer.tabulated
    layer.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer(torch.eye(D_IN).bfloat16()), before)


def test_gradients_reach_the_input_and_the_bias():
    layer, weight = make_layer("int4")
    layer.tabulate_()
    x = inputs(3, D_IN).requires_grad_()
    layer(x).square().sum().backward()
    result = x.detach().double() @ weight.T + layer.bias.detach().double()
    torch.testing.assert_close(x.grad.double(), 2 * result @ weight, rtol=1e-4, atol=1e-5)
    with_grad = layer.bias.grad.clone()
    layer.bias.grad = None
    layer(x.detach()).square().sum().backward()
    torch.testing.assert_close(layer.bias.grad, with_grad)


def test_autocast_and_wrong_inputs_are_as_with_a_dense_weight():
    layer = make_layer("int4")[0].tabulate_()
    dense = make_layer("int4")[0].unpack_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(inputs(2, D_IN)), dense(inputs(2, D_IN)))
    for x in (inputs(2, D_IN, dtype=torch.bfloat16), inputs(2, D_IN + 1)):
        with pytest.raises(RuntimeError) as wanted:
            dense(x)
        with pytest.raises(RuntimeError) as raised:
            layer(x)
        assert str(raised.value) == str(wanted.value)


@KINDS
def test_tabulating_adds_the_stated_bytes(kind):
    layer = make_layer(kind, torch.bfloat16)[0]
    before, stated = in_memory(layer), layer.preparing_bytes_on_cpu
    assert in_memory(layer.prepare_()) == before + stated
    wide = make_layer(kind, torch.float64)[0]
    assert wide.preparing_bytes_on_cpu == wide.unpacking_bytes
    assert not wide.prepare_().tabulated


def in_memory(layer):
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


@pytest.mark.gpu
@KINDS
def test_moving_to_a_gpu_unpacks(kind, accelerator):
    layer = make_layer(kind, torch.bfloat16)[0].tabulate_()
    weight = layer.dense_weight()
    layer.to(accelerator)
    assert not layer.tabulated
    assert torch.equal(layer.dense.cpu(), weight)
