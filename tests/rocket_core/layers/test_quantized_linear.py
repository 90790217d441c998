import copy

import pytest
import torch

from rocket_core.errors import CorruptCheckpointError, RocketError
from rocket_core.layers import QuantizedLinear, layer_tensors
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import D_IN, D_OUT, EXPONENT, QUANTIZED, as_tensors, make_layer, make_rounded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def packed(layer):
    return layer


def unpacked(layer):
    return layer.unpack_()


STATES = pytest.mark.parametrize("prepare", [packed, unpacked])
KINDS = pytest.mark.parametrize("kind", QUANTIZED)


@KINDS
@STATES
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dense_weight_is_bitwise_that_of_the_rounding(kind, prepare, dtype):
    layer = prepare(make_layer(kind, dtype)[0])
    expected = make_rounded(QUANTIZED[kind]).weight(dtype).T
    assert layer.dtype == expected.dtype
    assert torch.equal(layer.dense_weight(), expected)
    x = torch.eye(D_IN, dtype=dtype)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, expected, layer.bias))


@KINDS
@STATES
@pytest.mark.parametrize("bias", [True, False])
def test_casting_rounds_once(kind, prepare, bias):
    rounded = make_rounded(QUANTIZED[kind])
    layer = prepare(make_layer(kind, torch.bfloat16, bias=bias)[0])
    for cast in (layer.float, lambda: layer.to(torch.float64), lambda: layer.to("cpu", torch.float16)):
        cast()
        dtype = layer.dtype
        weight, x = rounded.weight(dtype).T, torch.eye(D_IN, dtype=dtype)
        assert torch.equal(layer.dense_weight(), weight)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
        stored = layer.state_dict()
        assert {name: stored[name].dtype for name in ("weight", "weight_scale")} == dict.fromkeys(
            ("weight", "weight_scale"), torch.uint8
        )
    assert dtype == torch.float16


def test_the_dtype_survives_the_meta_device():
    layer = make_layer("int4", torch.bfloat16, bias=False)[0]
    state = as_tensors(layer.state_dict())
    dense = layer.dense_weight()
    layer.unpack_().to("meta")
    assert layer.offloaded
    with pytest.raises(RocketError, match="offloaded"):
        layer.dense_weight()
    layer.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer(torch.eye(D_IN).bfloat16()), dense.T)


def test_the_default_dtype_is_that_of_torch():
    layer = QuantizedLinear(D_IN, D_OUT, code_format=QUANTIZED["int4"], scale_exponent=0)
    assert layer.dtype == torch.get_default_dtype()


@KINDS
def test_unpacking_adds_the_stated_bytes(kind):
    layer = make_layer(kind, torch.bfloat16)[0]
    before, stated = in_memory(layer), layer.unpacking_bytes
    assert in_memory(layer.unpack_()) == before + stated
    assert {name for name, _ in layer.named_parameters()} == {"codes", "weight_scale", "bias"}


def in_memory(layer):
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


@KINDS
@STATES
def test_loading_replaces_the_weight(kind, prepare):
    layer = prepare(make_layer(kind)[0])
    parameter = layer.stored
    other = make_rounded(QUANTIZED[kind], seed=9)
    state = layer_tensors(other, torch.float32) | {"bias": torch.zeros(D_OUT)}
    layer.load_state_dict(state)
    assert layer.stored is parameter
    assert torch.equal(layer(torch.eye(D_IN)), other.weight(torch.float32))
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


@STATES
def test_loading_checks_the_tensors(prepare):
    layer = prepare(make_layer("int3")[0])
    state = as_tensors(layer.state_dict())
    state["weight_scale"].view(torch.float16)[2] = float("inf")
    before = as_tensors(layer.state_dict())
    if prepare is packed:
        layer(torch.zeros(1, D_IN))
        layer.load_state_dict(state)
    with pytest.raises(CorruptCheckpointError, match="a scale is zero or not finite"):
        layer(torch.zeros(1, D_IN)) if prepare is packed else layer.load_state_dict(state)
    if prepare is unpacked:
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


@KINDS
@STATES
def test_copies_are_independent(kind, prepare):
    layer = prepare(make_layer(kind)[0])
    twin, x = copy.deepcopy(layer), torch.eye(D_IN)
    before = twin(x)
    assert torch.equal(before, layer(x))
    layer.load_state_dict(layer_tensors(make_rounded(QUANTIZED[kind], seed=9), torch.float32), strict=False)
    assert torch.equal(twin(x), before)
    assert not torch.equal(layer(x), before)


@KINDS
@STATES
def test_gradients_reach_the_input_and_the_bias_alone(kind, prepare):
    layer, weight = make_layer(kind, torch.float64)
    prepare(layer)
    x = torch.randn(3, D_IN, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x @ weight.T + layer.bias).detach() @ weight)
    assert {name for name, parameter in layer.named_parameters() if parameter.requires_grad} == {"bias"}


def test_the_dense_weight_of_an_unpacked_layer_is_a_copy():
    layer = make_layer("int4")[0].unpack_()
    before = layer(torch.eye(D_IN))
    layer.dense_weight().zero_()
    assert torch.equal(layer(torch.eye(D_IN)), before)


def test_an_input_of_integers_is_refused():
    layer = make_layer("int4")[0]
    x = torch.ones(1, D_IN).to(layer.weight.dtype)  # as T5 does
    with pytest.raises(RocketError, match="keep_packed"):
        layer(x)
    x = torch.ones(1, D_IN).to(layer.unpack_().weight.dtype)
    assert torch.equal(layer(x), layer(torch.ones(1, D_IN)))


@pytest.mark.parametrize("group_size", [D_IN, D_IN + 1, 2**70])
def test_a_group_may_be_a_whole_output(group_size):
    code_format = CodeFormat(bits=4, group_size=group_size, scale_bits=16)
    rounded = make_rounded(CodeFormat(bits=4, group_size=D_IN, scale_bits=16))
    layer = QuantizedLinear(D_IN, D_OUT, code_format=code_format, scale_exponent=EXPONENT)
    layer.load_state_dict(layer_tensors(rounded, torch.float32))
    assert torch.equal(layer.dense_weight(), rounded.rows(torch.float32))


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_decodes_the_same_bits(kind, dtype, accelerator):
    layer = make_layer(kind, dtype)[0]
    weight = layer.dense_weight()
    assert torch.equal(layer.to(accelerator).dense_weight().cpu(), weight)
    assert torch.equal(layer.unpack_().dense.cpu(), weight)
    assert torch.equal(layer.cpu().dense, weight)
