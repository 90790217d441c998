"""Training of the continuous numbers of stored layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rocket_core.hf import attach_factors
from rocket_core.layers import QuantizedLinear
from rocket_core.refinement import ScaledLinear, close_values, continuous_names, open_values, round_values
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.factored_models import (
    INPUT_IDS,
    coded_values,
    embedding_codes,
    logits,
    mixed_factors,
    quantized_factors,
    stored_layers,
)
from tests.reference.stored_layers import ALL_KINDS, D_IN, as_tensors, make_layer
from tests.reference.tiny_models import build_gpt2, build_llama

MODELS = {
    "coefficients": (build_llama, mixed_factors),
    "Conv1D": (build_gpt2, mixed_factors),
    "codes": (build_llama, quantized_factors),
    "codes of coefficients": (build_llama, coded_values),
    "embeddings": (build_llama, embedding_codes),
}


def compressed(case):
    build, factors = MODELS[case]
    model = build()
    return attach_factors(model, factors(model)).eval()


def train(model, steps=3):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(steps):
        model(INPUT_IDS, labels=INPUT_IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", MODELS)
def test_training_keeps_supports_codes_and_bytes(case):
    model = compressed(case)
    names = continuous_names(model)
    before = as_tensors(model.state_dict())
    open_values(model)
    train(model)
    close_values(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert (tensor.shape, tensor.dtype) == (before[name].shape, before[name].dtype), name
        if name not in names:
            assert torch.equal(tensor, before[name]), name
    changed = {name for name in names if not torch.equal(after[name], before[name])}
    # Gradients of position embeddings beyond the text, among others, are zero, but no tensor is without any.
    assert changed == names


@pytest.mark.parametrize("case", MODELS)
def test_rounded_numbers_are_those_that_are_stored(case):
    model = compressed(case)
    dtypes = dict.fromkeys(continuous_names(model), torch.bfloat16)
    open_values(model)
    train(model)
    unrounded = as_tensors(dict(model.named_parameters()))
    round_values(model, dtypes)
    rounded = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(not torch.equal(parameter, unrounded[name]) for name, parameter in rounded.items())
    expected = logits(model)
    close_values(model)
    for name, tensor in model.state_dict().items():
        if name in dtypes and tensor.is_floating_point():
            tensor.copy_(tensor.to(dtypes[name]))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_without_a_step_nothing_changes(case):
    model = compressed(case)
    before, expected = as_tensors(model.state_dict()), logits(model)
    open_values(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    close_values(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_what_is_continuous_by_kind():
    found = {kind: continuous_names(make_layer(kind)[0]) for kind in ALL_KINDS}
    assert found == {
        "factored": {"weight", "weight_u", "bias"},
        "low rank": {"weight", "weight_u", "bias"},
        "follower": {"weight", "bias"},
        "sparse": {"weight", "bias"},
        "full": {"weight", "bias"},
        "int4": {"bias"},
        "int3": {"weight_scale", "bias"},
        "int8": {"bias"},
    }


def test_names_do_not_depend_on_the_form_in_memory():
    for kind in ALL_KINDS:
        layer, _ = make_layer(kind)
        packed = continuous_names(layer)
        assert continuous_names(layer.unpack_()) == packed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_layer_is_trained_in_float32(dtype):
    block = nn.Sequential(make_layer("factored", dtype)[0], nn.LayerNorm(5, dtype=dtype))
    open_values(block)
    assert all(parameter.dtype == torch.float32 for parameter in block.parameters() if parameter.requires_grad)
    close_values(block)
    assert block.to(dtype).state_dict()["0.weight"].dtype == dtype


@pytest.mark.parametrize("form", ["packed", "unpacked", "tabulated"])
def test_scales_and_their_gradient_follow_the_formula(form):
    layer, weight = make_layer("int3")
    {"packed": lambda: layer, "unpacked": layer.unpack_, "tabulated": layer.tabulate_}[form]()
    scaled = ScaledLinear(layer)
    torch.testing.assert_close(scaled.weight.double(), weight, rtol=1e-6, atol=0)
    inputs = torch.randn(6, D_IN, generator=torch.Generator().manual_seed(1))
    output = scaled(inputs)
    torch.testing.assert_close(
        output.double(), functional.linear(inputs.double(), weight, layer.bias.double()), rtol=1e-5, atol=1e-5
    )
    output.square().sum().backward()
    upstream = 2 * output.detach().double().T @ inputs.double()
    groups = torch.arange(D_IN) // 2
    expected = torch.zeros(len(upstream), int(groups.max()) + 1, dtype=torch.float64)
    expected.index_add_(1, groups, upstream * scaled.codes.double())
    torch.testing.assert_close(scaled.scales.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_trained_scales_are_stored_as_float16():
    layer, _ = make_layer("int3")
    scaled = ScaledLinear(layer)
    with torch.no_grad():
        scaled.scales.mul_(1.01).add_(1e-5)
        wanted = scaled.weight
    restored = scaled.restored()
    assert restored is layer
    torch.testing.assert_close(restored.dense_weight(torch.float32), wanted, rtol=2**-10, atol=1e-7)


def test_a_scale_trained_to_zero_can_be_stored():
    layer, _ = make_layer("int3")
    scaled = ScaledLinear(layer)
    with torch.no_grad():
        scaled.scales.zero_()
    assert scaled.restored().dense_weight(torch.float32).abs().max() < 1e-6


def test_logarithmic_scales_are_left_alone():
    code_format = CodeFormat(bits=4, group_size=16, scale_bits=8)
    layer = QuantizedLinear(16, 4, code_format=code_format, scale_exponent=0)
    with pytest.raises(AssertionError, match="codes"):
        ScaledLinear(layer)


def test_coefficients_outside_the_support_stay_zero():
    model = compressed("coefficients")
    open_values(model)
    train(model)
    for name, layer in stored_layers(model).items():
        kept = layer.state_dict()["weight"]
        assert torch.count_nonzero(layer.coefficients) <= kept.numel(), name
