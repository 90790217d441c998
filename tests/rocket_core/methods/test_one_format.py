"""Methods that store every layer in one format, compared with rounding by definition."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.config import CompressionConfig
from rocket_core.layers import layer_tensors
from rocket_core.methods import method_for
from rocket_core.sizes.code_format import CODE_BITS
from tests.reference import rounding as reference
from tests.reference.problems import example

NAMES = ("rtn", "gptq")
SHAPES = [(24, 12), (70, 6), (33, 4)]


def method(name, **settings):
    return method_for(CompressionConfig(method=name, **settings), 2)


def compressed(name, problem, **settings):
    one = method(name, **settings)
    [candidate] = one.profile(problem)
    return candidate, one.compress(problem, candidate)


def damped(gram):
    return gram + 0.01 * float(gram.diagonal().mean()) * torch.eye(len(gram), dtype=gram.dtype)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gptq_equals_gptq_by_definition(shape, bits):
    problem = example(shape[0], shape[1:]).problem
    rounded = compressed("gptq", problem, code_bits=bits)[1].factors
    gram = damped(problem.statistics.gram)
    order = gram.diagonal().argsort(descending=True).tolist()
    steps = rounded.scales.by_input(shape[0], torch.float64)
    expected = reference.round_in_order(gram, problem.weight, steps, order, bits)
    assert np.array_equal(rounded.codes.numpy(), expected)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rtn_rounds_every_weight_by_itself(shape, bits):
    problem = example(shape[0], shape[1:]).problem
    rounded = compressed("rtn", problem, code_bits=bits)[1].factors
    steps = rounded.scales.by_input(shape[0], torch.float64)
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        part = float(problem.weight[row, column] / steps[row, column])
        assert int(rounded.codes[row, column]) == reference.code(part, bits)


@pytest.mark.parametrize("group_size", [0, 32, 64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_one_candidate_has_the_format_that_was_set(name, group_size):
    layer = example(70, (6,))
    candidate, found = compressed(name, layer.problem, code_bits=3, group_size=group_size)
    assert (candidate.bits, candidate.scale_bits) == (3, 16)
    assert candidate.group_size == min(group_size or 70, 70)
    groups = {0: 1, 32: 3, 64: 2, 128: 1}[group_size]
    codes, scales = (found.factors.codes, found.factors.scales)
    assert (codes.shape, scales.codes.shape) == ((70, 6), (groups, 6))
    assert candidate.stored_bytes == -(-70 * 6 // 8) * 3 + 2 * 6 * groups
    assert candidate.stored_bytes == sum(t.nbytes for t in layer_tensors(found.factors, torch.float16).values())
    _, relative, distance, _ = layer.errors(found.factors.weight(torch.float64))
    assert candidate.reconstruction_error == pytest.approx(relative, rel=1e-6)
    assert candidate.weight_error == pytest.approx(distance, rel=1e-6)
    assert candidate.loss is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.sampled_from(CODE_BITS), name=st.sampled_from(NAMES), sign=st.booleans())
def test_scales_are_positive_and_minimise_the_squared_error(seed, bits, name, sign):
    problem = example(40, (3,), seed=seed).problem
    problem.weight.abs_().mul_(1 if sign else -1)
    found = compressed(name, problem, code_bits=bits)[1].factors.scales
    scales = found.values(torch.float64)
    assert bool((scales > 0).all())
    every = [2.0 ** (found.exponent - step / 16) for step in range(16 * 12)]
    for group, column in itertools.product(range(2), range(3)):
        values = problem.weight[32 * group : 32 * group + 32, column].tolist()
        ones = [1.0] * len(values)
        largest = max(map(abs, values))
        own = reference.least_scale_error(values, ones, bits, [float(scales[group, column])])
        tries = [s for s in every if 0.4 * largest / 2 ** (bits - 1) <= s <= largest / (2 ** (bits - 1) - 1)]
        # The scale that was found is rounded to float16, which matters more to larger codes.
        assert own <= (1.02 + 2**bits / 2**11) * reference.least_scale_error(values, ones, bits, tries)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_gptq_has_less_error_than_rounding_to_nearest(bits):
    problem = example(64, (48,)).problem
    errors = [float(compressed(name, problem, code_bits=bits)[1].errors.sum()) for name in NAMES]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("name", NAMES)
def test_zero_weights_and_dead_inputs_do_no_harm(name):
    problem = example(16, (24,)).problem
    problem.statistics.gram[3] = problem.statistics.gram[:, 3] = 0
    assert compressed(name, problem, code_bits=4)[1].factors.weight(torch.float64).isfinite().all()
    problem.weight.zero_()
    candidate, found = compressed(name, problem, code_bits=4)
    assert candidate.reconstruction_error == candidate.weight_error == 0
    assert not found.factors.codes.any()
