"""Tests of losses on held-out tokens."""

from dataclasses import replace

import pytest
import torch

from rocket_core.config import CompressionConfig
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem, method_for
from rocket_core.methods.held_out import loss_factor
from rocket_core.methods.layer_problem import CompressedLayer

D_IN, D_OUT = 48, 32


def rows(count, *, massive=0.0, seed=0):
    """Return inputs, and which of them are massive: 300 times as long, in one direction."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, D_IN, generator=generator) * torch.linspace(0.2, 2, D_IN)
    chosen = torch.rand(count, generator=generator) < massive
    found[chosen] += 300 * torch.linspace(-1, 1, D_IN).square()
    return found, chosen


def problem_of(inputs, *, outputs=D_OUT):
    generator = torch.Generator().manual_seed(9)
    gram = (inputs.mT @ inputs).double()
    return LayerProblem(
        weight=torch.randn(D_IN, outputs, generator=generator),
        statistics=GramStatistics(tokens=len(inputs), gram=gram, output_gram=None, input_energy=gram.diagonal()),
        shrinkage=0.05,
        precision=torch.float32,
        output_weights=torch.rand(outputs, generator=generator).double() + 0.5,
    )


def loss_on(problem, tokens, gradients, compressed):
    """Return half the mean over tokens of the sum over outputs of squared gradients times squared errors."""
    assert isinstance(compressed, CompressedLayer)
    removed = problem.weight - compressed.factors.weight(torch.float32)
    errors = (tokens @ removed).double().square() @ problem.output_weights.square()
    return float((errors * gradients).mean()) / 2


def rounded(problem, bits):
    config = CompressionConfig(bits=8, kinds=("quantized",), code_bits=(bits,), group_size=(16,))
    method = method_for(config, 2)
    found = [one for one in method.profile(problem) if one.bits == bits]
    return found[0], method.compress(problem, found[0])


def test_it_is_one_where_gradients_are_independent_of_errors():
    problem = problem_of(rows(20_000)[0])
    held, _ = rows(4_000, seed=1)
    assert loss_factor(problem, held, torch.ones(4_000)) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("bits", [3, 6])
def test_errors_of_massive_tokens_without_gradients_cost_little(bits):
    problem = problem_of(rows(20_000, massive=0.004)[0])
    held, massive = rows(8_000, massive=0.004, seed=1)
    gradients = torch.where(massive, 1e-6, 1.0)
    factor = loss_factor(problem, held, gradients)
    candidate, compressed = rounded(replace(problem, loss_factors=(factor,)), bits)
    exact = loss_on(problem, held, gradients, compressed)
    assert 0.7 * exact < candidate.loss < 1.6 * exact
    plain, _ = rounded(problem, bits)
    assert plain.loss > candidate.loss


def test_few_tokens_make_errors_of_others_larger():
    problem = problem_of(rows(100)[0])
    held, _ = rows(4_000, seed=1)
    factor = loss_factor(problem, held, torch.ones(4_000))
    candidate, compressed = rounded(replace(problem, loss_factors=(factor,)), 4)
    exact = loss_on(problem, held, torch.ones(4_000), compressed)
    assert factor > 1.2
    assert 0.7 * exact < candidate.loss < 1.6 * exact


def test_the_factor_is_that_of_the_gradients():
    problem = problem_of(rows(20_000)[0])
    held, _ = rows(4_000, seed=1)
    assert loss_factor(problem, held, torch.full((4_000,), 3.0)) == pytest.approx(3, rel=0.1)
