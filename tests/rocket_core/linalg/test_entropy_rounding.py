"""Rounding for error and bits, compared with the definitions, with a search, and with theory."""

import math

import numpy as np
import pytest
import torch

from rocket_core.linalg.entropy_rounding import (
    RateTarget,
    StepScales,
    bit_worth,
    code_lengths,
    entropy_bits,
    improve_for_rate,
    relative_steps,
    round_each,
    round_for_rate,
)
from rocket_core.linalg.rounding import gptq
from tests.reference import rounding as reference
from tests.rocket_core.linalg.test_rounding import random_layer
from tests.sampling import sweep


def importance_of(d_out, seed=0):
    return torch.rand(d_out, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05


def rounded_at(weight, gram, importance, c, *, sweeps=0):
    target = RateTarget.of(StepScales.of(weight, relative_steps(gram, importance)), importance, c)
    rounded, _ = round_for_rate(weight, gram, target)
    return improve_for_rate(weight, gram, rounded, target.worth, sweeps=sweeps)[0]


def weighted_error(weight, gram, rounded, importance):
    errors = reference.output_error(gram.matrix.double(), weight.double(), rounded.weight(torch.float64))
    return float((torch.as_tensor(errors) * importance).sum())


def objective(weight, gram, rounded, lengths, worth):
    """Return error plus worth of bits of each output."""
    errors = torch.as_tensor(reference.output_error(gram.matrix, weight, rounded.weight(torch.float64)))
    return errors + worth * lengths[rounded.codes.long() + 127].sum(dim=0)


@pytest.mark.parametrize("c", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("d_in", "d_out"), [(1, 3), (20, 4), (70, 2)])
def test_each_code_is_the_cheaper_of_two(d_in, d_out, c):
    weight, gram = random_layer(d_in, d_out, seed=d_in)
    importance = importance_of(d_out)
    target = RateTarget.of(StepScales.of(weight, relative_steps(gram, importance)), importance, c)
    scales, lengths, worth = target.scales, target.lengths, target.worth
    assert torch.equal(lengths, code_lengths(round_each(weight, scales).codes))
    found = round_for_rate(weight, gram, target)[0].codes.numpy()

    matrix, steps = gram.matrix.numpy(), scales.values(torch.float64)[0].numpy()
    order = gram.order.tolist()
    for column in range(d_out):
        error = np.zeros(d_in)
        for place, row in enumerate(order):
            free, done = order[place:], order[:place]
            block = matrix[np.ix_(free, free)]
            value = weight[row, column] + np.linalg.solve(block, matrix[np.ix_(free, done)] @ error[done])[0]
            # Error that remains for each unit of this input's, after all later inputs compensate it.
            stiffness = 1 / np.linalg.inv(block)[0, 0]
            part = float(value) / steps[column]
            nearest = min(max(round(part), -127), 127)
            costs = {
                code: stiffness * (value - code * steps[column]) ** 2 + worth[column] * lengths[code + 127]
                for code in (nearest, nearest - int(np.sign(nearest)))
            }
            assert found[row, column] == min(costs, key=costs.get)
            error[row] = weight[row, column] - found[row, column] * steps[column]


def test_bits_of_no_worth_leave_gptq():
    weight, gram = random_layer(70, 5)
    scales = StepScales.of(weight, relative_steps(gram, torch.ones(5))).at(0.5)
    target = RateTarget(scales=scales, lengths=torch.zeros(255).double(), worth=torch.zeros(5).double())
    rounded, _ = round_for_rate(weight, gram, target)
    assert torch.equal(rounded.codes, gptq(weight, gram, scales).codes)
    assert rounded.entropy_coded


@pytest.mark.parametrize("c", [0.3, 1.0, 3.0])
def test_a_sweep_never_increases_error_plus_bits(c):
    weight, gram = random_layer(40, 6)
    importance = importance_of(6)
    start = rounded_at(weight, gram, importance, c)
    worth, lengths = bit_worth(importance, c), code_lengths(start.codes)
    improved, errors = improve_for_rate(weight, gram, start, worth, sweeps=1)
    exact = reference.output_error(gram.matrix, weight, improved.weight(torch.float64))
    torch.testing.assert_close(errors, torch.as_tensor(exact))
    before, after = (objective(weight, gram, rounded, lengths, worth) for rounded in (start, improved))
    assert bool((after <= before * (1 + 1e-12)).all())
    assert float(after.sum()) < float(before.sum())


def test_lengths_and_entropy_are_those_of_the_counts():
    codes = torch.tensor([[0, 0, 1, -1], [0, 0, 1, 127]], dtype=torch.int8)
    assert float(entropy_bits(codes)) == pytest.approx(4 / 8 * 1 + 2 / 8 * 2 + 2 * 1 / 8 * 3)
    lengths = code_lengths(codes)
    assert lengths[[127, 128, 126, 254]].tolist() == pytest.approx([1, 2, 3, 3], abs=1)
    assert float((2**-lengths).sum()) == pytest.approx(1)


def test_at_high_rate_every_entry_has_the_error_of_theory():
    weight, gram = random_layer(96, 200, spread=2.0)
    importance = importance_of(200)
    c = 2.0**-3
    scales = StepScales.of(weight, relative_steps(gram, importance)).at(c)
    found = weighted_error(weight, gram, gptq(weight, gram, scales), importance)
    # Inputs differ in what they can compensate.
    pivots = gram.factor.diagonal()
    expected = c**2 / 12 * float((pivots.log().mean().exp() / pivots).square().mean())
    assert found / weight.numel() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("bits", sweep([2.5], soak=[1.5, 4.0]))
def test_at_equal_entropy_there_is_less_error(bits):
    weight, gram = random_layer(96, 64, spread=2.0)
    importance = torch.ones(64, dtype=torch.float64)

    def error_at(make):
        low, high = -12.0, 8.0
        for _ in range(25):
            middle = (low + high) / 2
            rounded = make(2**middle)
            low, high = (middle, high) if entropy_bits(rounded.codes) > bits else (low, middle)
        return weighted_error(weight, gram, make(2**high), importance)

    steps = relative_steps(gram, importance)
    plain = error_at(lambda c: gptq(weight, gram, StepScales.of(weight, steps).at(c)))
    weighed = error_at(lambda c: rounded_at(weight, gram, importance, c))
    swept = error_at(lambda c: rounded_at(weight, gram, importance, c, sweeps=2))
    assert weighed < plain
    assert swept < {1.5: 0.75, 2.5: 0.92, 4.0: 0.96}[bits] * plain


def test_steps_are_stored_within_a_12th_of_an_octave():
    steps = torch.logspace(-3, 0, 50, dtype=torch.float64)
    stored = StepScales.of(torch.zeros(7, 50).double(), steps).at(1.0).values(torch.float64)[0]
    assert float((stored / steps).log2().abs().max()) <= 1 / 12 + 1e-9


def test_the_largest_weight_has_a_code():
    weight = torch.tensor([[1.0, -300.0], [0.5, 2.0]], dtype=torch.float64)
    scales = StepScales.of(weight, torch.full((2,), 0.01).double()).at(1.0)
    parts = weight / scales.values(torch.float64)
    assert 100 < float(parts[:, 1].abs().max()) < 127
    assert 90 < float(parts[0, 0]) < 110


def test_outputs_of_larger_importance_have_smaller_steps():
    _, gram = random_layer(12, 1)
    steps = relative_steps(gram, torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64))
    assert steps.tolist() == pytest.approx([float(steps[0]) / divisor for divisor in (1, 2, 4)])
    pivots = gram.factor.diagonal().tolist()
    assert float(steps[0]) == pytest.approx(math.exp(sum(map(math.log, pivots)) / 12))
