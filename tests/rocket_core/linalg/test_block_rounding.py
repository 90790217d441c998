import numpy as np
import pytest
import torch

from rocket_core.linalg.block_codes import in_half
from rocket_core.linalg.block_rounding import refit_block_scales, round_to_blocks
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import gptq, improve, round_to_nearest
from rocket_core.sizes.block_types import BLOCK_FORMATS, BLOCK_TYPES, VLLM_TYPES
from tests.reference import rounding as reference
from tests.reference.llama_cpp import dequantize, quantize
from tests.rocket_core.linalg.test_rounding import random_layer

D_IN = 256
ALL_TYPES = (*BLOCK_TYPES, *VLLM_TYPES)


@pytest.fixture(scope="module")
def layer():
    return random_layer(D_IN, 6, seed=3)


def error(layer, rounded):
    weight, gram = layer
    return float(reference.output_error(gram.matrix, weight, rounded.weight(weight.dtype)).sum())


def scales_of(layer, name):
    weight, gram = layer
    return search_block_scales(weight, gram.matrix.diagonal(), BLOCK_FORMATS[name])


@pytest.mark.parametrize("name", ALL_TYPES)
def test_every_step_reduces_the_error(layer, name):
    weight, gram = layer
    scales = scales_of(layer, name)
    rounded = gptq(weight, gram, scales)
    improved = improve(weight, gram, rounded)
    slope = gram.slope(weight, improved)
    refitted = refit_block_scales(gram, improved, slope)
    torch.testing.assert_close(slope, gram.slope(weight, refitted))
    errors = [error(layer, step) for step in (round_to_nearest(weight, scales), rounded, improved, refitted)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.8 * errors[0]
    best, damped_errors = round_to_blocks(weight, gram, BLOCK_FORMATS[name], splitting=False)
    least = error(layer, best)
    assert float(damped_errors.sum()) == pytest.approx(least)
    # Scales of these types are few, and those at the start may be the best.
    assert least < errors[-1] or (name in VLLM_TYPES and least == errors[-1])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_no_single_scale_can_be_improved_after_many_refits(layer, name):
    weight, gram = layer
    start = gptq(weight, gram, scales_of(layer, name))
    rounded = refit_block_scales(gram, start, gram.slope(weight, start), sweeps=60)
    least = error(layer, rounded)
    for field, step in (("group_scales", 1), ("group_scales", -1), ("group_minima", 1), ("group_minima", -1)):
        integers = getattr(rounded.scales, field)
        block_format = BLOCK_FORMATS[name]
        if integers is None or block_format.groups_per_block == 1:
            continue
        low, high = block_format.scales if field == "group_scales" else (0, block_format.largest_minimum)
        changed = integers.clone()
        changed[3, 2] += step
        if changed[3, 2] != 0 and low <= changed[3, 2] <= high:
            scales = {part: getattr(rounded.scales, part) for part in rounded.scales.__dataclass_fields__}
            moved = type(rounded.scales)(**{**scales, field: changed})
            assert error(layer, moved.rounded(rounded.codes)) >= least


@pytest.mark.parametrize("name", ALL_TYPES)
def test_codes_are_levels_of_the_type(layer, name):
    weight, gram = layer
    rounded, _ = round_to_blocks(weight, gram, BLOCK_FORMATS[name], splitting=False)
    assert set(rounded.codes.unique().tolist()) <= set(BLOCK_FORMATS[name].levels)
    assert bool((rounded.scales.group_scales != 0).all())
    assert bool((rounded.scales.block_scales != 0).all())


@pytest.mark.parametrize("name", ALL_TYPES)
def test_outputs_do_not_depend_on_other_outputs(layer, name):
    weight, gram = layer
    whole, _ = round_to_blocks(weight, gram, BLOCK_FORMATS[name], splitting=False)
    part, _ = round_to_blocks(weight[:, 2:4].contiguous(), gram, BLOCK_FORMATS[name], splitting=False)
    torch.testing.assert_close(whole.weight(torch.float64)[:, 2:4], part.weight(torch.float64))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_nearest_rounding_is_not_worse_than_that_of_llama_cpp(name):
    weight, gram = random_layer(256, 32, seed=4)
    importance = gram.matrix.diagonal()
    own = round_to_nearest(weight, search_block_scales(weight, importance, BLOCK_FORMATS[name])).weight(weight.dtype)
    theirs = dequantize(quantize(weight.T.numpy(), name, importance.numpy()), name).T
    errors = [float((importance[:, None] * (weight - torch.as_tensor(other)) ** 2).sum()) for other in (own, theirs)]
    assert errors[0] <= 1.02 * errors[1]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_the_output_error_is_far_below_that_of_llama_cpp(name):
    weight, gram = random_layer(256, 16, seed=5)
    own = round_to_blocks(weight, gram, BLOCK_FORMATS[name], splitting=False)[0].weight(weight.dtype)
    theirs = torch.as_tensor(dequantize(quantize(weight.T.numpy(), name, gram.matrix.diagonal().numpy()), name).T)
    errors = [float(reference.output_error(gram.matrix, weight, other.double()).sum()) for other in (own, theirs)]
    assert errors[0] < 0.6 * errors[1]


def test_scales_in_half_precision_are_neither_zero_nor_infinite():
    halves = in_half(torch.tensor([0.0, -1e-12, 1e9, -1e9, 0.5]), BLOCK_FORMATS["Q8_0"]).double()
    expected = np.array([2.0**-24, -(2.0**-24), 65504.0, -65504.0, 0.5])
    assert np.array_equal(halves.numpy(), expected)
