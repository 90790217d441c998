import math
from dataclasses import replace

import pytest
import torch

from rocket_core.config import CompressionConfig
from rocket_core.errors import IllConditionedGramError
from rocket_core.linalg.least_squares import output_errors
from rocket_core.linalg.whitening import eigenbasis
from rocket_core.methods import method_for, output_weights
from tests.reference.problems import example


@pytest.mark.parametrize("output_gram", [False, True])
@pytest.mark.parametrize("weights", [None, 2])
def test_the_eigenbasis_is_that_of_the_weighted_whitened_weight(output_gram, weights):
    layer = example(20, (12,), weights=weights, output_gram=output_gram)
    basis = layer.problem.eigenbasis()
    scale = torch.ones(12, dtype=torch.float64) if weights is None else layer.problem.output_weights
    whitened = layer.inputs @ (layer.problem.weight * scale)
    torch.testing.assert_close(basis.singular_values, torch.linalg.svdvals(whitened), rtol=1e-7, atol=1e-9)
    gram = basis.directions @ torch.diag(basis.singular_values**2) @ basis.directions.T
    torch.testing.assert_close(gram, whitened.T @ whitened, rtol=1e-6, atol=1e-8)
    assert layer.problem.eigenbasis() is basis


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_the_rough_basis_spans_nearly_the_same(shape):
    problem = example(shape[0], shape[1:], weights=1, precision=torch.float32, spread=3.0).problem
    exact, rough = problem.eigenbasis(), problem.rough_basis()
    assert rough.directions.dtype == torch.float32
    torch.testing.assert_close(rough.singular_values.double(), exact.singular_values, rtol=1e-3, atol=1e-3)
    for rank in (1, 6, 12):
        overlap = exact.directions[:, :rank].double().T @ rough.directions[:, :rank].double()
        assert float(torch.linalg.svdvals(overlap).min()) == pytest.approx(1, abs=1e-3)
    assert problem.rough_basis() is rough


def test_the_basis_is_exact_where_the_precision_is_too_low():
    # There are fewer tokens than inputs.
    problem = replace(example(96, (128,), precision=torch.float32).problem, shrinkage=0.0)
    with pytest.raises(IllConditionedGramError):
        eigenbasis(problem.scaled_weight.float(), problem.gram())
    assert problem.rough_basis() is problem.eigenbasis()


def test_scaling_and_unscaling_are_inverse():
    problem = example(6, (9,), weights=3).problem
    torch.testing.assert_close(problem.unscaled(problem.scaled_weight), problem.weight, rtol=1e-12, atol=0)
    plain = example(6, (9,)).problem
    assert torch.equal(plain.scaled_weight, plain.weight)
    assert plain.predicted_loss_increase(3.0) is None


def test_output_errors_equal_those_of_the_tokens():
    layer = example(10, (7,))
    removed = torch.randn(10, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.stack([torch.linalg.norm(layer.inputs @ removed[:, j]) ** 2 for j in range(7)])
    torch.testing.assert_close(output_errors(layer.problem.gram(), removed), expected, rtol=1e-9, atol=1e-12)


def test_column_weights_are_roots_of_sensitivities():
    fisher_diagonal = torch.tensor([0.0, 1e-9, 0.04, 4.0])
    mean = float(fisher_diagonal.double().mean())
    per_output = output_weights(fisher_diagonal, per_output=True)
    # The first two are raised to a ten-thousandth of the mean.
    expected = torch.tensor([math.sqrt(1e-4 * mean)] * 2 + [0.2, 2.0], dtype=torch.float64)
    torch.testing.assert_close(per_output, expected, rtol=1e-6, atol=0)
    equal = output_weights(fisher_diagonal, per_output=False)
    torch.testing.assert_close(equal, torch.full((4,), math.sqrt(mean), dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("fisher_diagonal", [0.0, 1e-37])
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("kind", ["low_rank", "factored", "sparse"])
def test_tiny_sensitivities_do_not_harm_float32(fisher_diagonal, per_output, kind):
    plain = example(32, (32,), precision=torch.float32).problem
    plain.weight.mul_(3e-3)
    weights = output_weights(torch.full((32,), fisher_diagonal), per_output=per_output)
    weighted = replace(plain, output_weights=weights, basis=None)
    rocket = method_for(CompressionConfig(ratio=0.3, kinds=(kind,), objective="whitened", sweeps=1), 2)
    for candidate, other in zip(rocket.profile(weighted), rocket.profile(plain), strict=True):
        assert candidate.reconstruction_error == pytest.approx(other.reconstruction_error, rel=3e-2)
        assert candidate.weight_error == pytest.approx(other.weight_error, rel=3e-2)
        assert candidate.loss < 1e-9


def member_of(layer, part, factor):
    """Return what is known of one of the layers whose weights a problem concatenates."""
    problem = layer.problem
    weights = problem.output_weights[part]
    own = replace(
        problem,
        weight=problem.weight[:, part],
        output_weights=weights,
        output_widths=(len(weights),),
        loss_factors=(factor,),
    )
    return own.as_member()


def test_a_group_knows_what_its_members_know():
    layer = example(20, (16, 8), weights=2)
    members = tuple(member_of(layer, part, factor) for part, factor in ((slice(16), 1.0), (slice(16, None), 3.0)))
    group = replace(layer.problem, members=members)
    torch.testing.assert_close(group.output_energies(), layer.problem.output_energies())
    assert group.predicted_loss_increase(5.0, member=1) == pytest.approx(3 * group.predicted_loss_increase(5.0))
    assert [len(member.singular_values) for member in members] == [16, 8]
    whole = group.eigenbasis().singular_values.square().sum()
    assert sum(float(member.singular_values.square().sum()) for member in members) == pytest.approx(float(whole))
