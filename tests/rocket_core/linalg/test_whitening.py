import pytest
import torch

from rocket_core.errors import IllConditionedGramError
from rocket_core.linalg.whitening import (
    GramStatistics,
    basis_from_statistics,
    eigenbasis,
    eigenbasis_of_output_gram,
    shrunk_for_weights,
    shrunk_gram,
    shrunk_output_gram,
    whitening_factor,
)


def random_layer(d_in, d_out, tokens=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, d_in, generator=generator, dtype=torch.float64)
    inputs = inputs * torch.linspace(0.1, 3, d_in, dtype=torch.float64)
    return torch.randn(d_in, d_out, generator=generator, dtype=torch.float64), inputs


def test_whitening_factor_is_upper_triangular_and_gives_the_gram():
    _, inputs = random_layer(12, 4)
    gram = inputs.T @ inputs
    factor = whitening_factor(gram)
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.T @ factor, gram, rtol=1e-9, atol=1e-6)


def test_whitening_factor_accepts_an_input_that_never_fires():
    _, inputs = random_layer(6, 4)
    inputs[:, 2] = 0
    assert torch.isfinite(whitening_factor(inputs.T @ inputs)).all()


@pytest.mark.parametrize("gram", [-torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)])
def test_whitening_factor_refuses_an_invalid_gram_matrix(gram):
    with pytest.raises(IllConditionedGramError, match="more samples"):
        whitening_factor(gram)


@pytest.mark.parametrize("shape", [(12, 12), (12, 5), (5, 12)])
def test_eigenbasis_is_the_svd_of_the_whitened_weight(shape):
    weight, inputs = random_layer(*shape)
    gram = inputs.T @ inputs
    basis = eigenbasis(weight, gram)
    _, singular_values, right = torch.linalg.svd(torch.linalg.cholesky(gram).T @ weight, full_matrices=False)
    torch.testing.assert_close(basis.singular_values, singular_values, rtol=1e-7, atol=1e-6)
    agreement = (basis.directions * right.T).sum(0).abs()
    torch.testing.assert_close(agreement, torch.ones_like(agreement), rtol=1e-7, atol=1e-7)


def test_bases_from_input_and_output_gram_matrices_are_equal():
    weight, inputs = random_layer(14, 6)
    outputs = inputs @ weight
    from_input = eigenbasis(weight, inputs.T @ inputs)
    from_output = eigenbasis_of_output_gram(outputs.T @ outputs)
    torch.testing.assert_close(from_input.singular_values, from_output.singular_values)
    torch.testing.assert_close(from_input.directions.abs(), from_output.directions.abs(), rtol=1e-6, atol=1e-7)


def test_shrinkage_is_the_same_from_either_side():
    weight, inputs = random_layer(10, 7)
    gram, outputs = inputs.T @ inputs, inputs @ weight
    seen_from_output = shrunk_output_gram(outputs.T @ outputs, weight, gram.diagonal(), 200, 0.3)
    torch.testing.assert_close(seen_from_output, weight.T @ shrunk_gram(gram, 200, 0.3) @ weight)


def test_shrinkage_vanishes_with_many_tokens_and_grows_with_few():
    gram = torch.full((4, 4), 2.0, dtype=torch.float64)
    assert torch.equal(shrunk_gram(gram, 10**12, 0.0), gram)
    expected = 2.0 * (1 + 0.05 * 4 / 2)
    assert float(shrunk_gram(gram, 2, 0.05)[1, 1]) == pytest.approx(expected)
    assert float(shrunk_gram(gram, 2, 0.05)[0, 1]) == 2.0


def test_shrinkage_lowers_the_held_out_error_with_few_tokens():
    generator = torch.Generator().manual_seed(3)
    d, tokens, rank = 64, 16, 24
    energy = torch.logspace(0, -2, d, dtype=torch.float64)[torch.randperm(d, generator=generator)]
    weight = torch.randn(d, d, generator=generator, dtype=torch.float64)
    seen = torch.randn(tokens, d, generator=generator, dtype=torch.float64) * energy
    unseen = torch.randn(4000, d, generator=generator, dtype=torch.float64) * energy

    def held_out_error(shrinkage):
        basis = eigenbasis(weight, shrunk_gram(seen.T @ seen, tokens, shrinkage))
        rows = basis.directions[:, :rank]
        return float((unseen @ (weight - weight @ rows @ rows.T)).norm() / (unseen @ weight).norm())

    assert held_out_error(0.05) < 0.97 * held_out_error(0.0)


@pytest.mark.parametrize("from_output", [False, True])
def test_either_collected_matrix_gives_the_same_basis(from_output):
    weight, inputs = random_layer(9, 6)
    outputs = inputs @ weight
    statistics = GramStatistics(
        tokens=len(inputs),
        gram=None if from_output else inputs.T @ inputs,
        output_gram=outputs.T @ outputs if from_output else None,
        input_energy=inputs.square().sum(0),
    )
    basis = basis_from_statistics(weight.float(), statistics, shrinkage=0.1)
    expected = eigenbasis(weight, shrunk_gram(inputs.T @ inputs, len(inputs), 0.1))
    torch.testing.assert_close(basis.singular_values, expected.singular_values, rtol=1e-5, atol=1e-5)
    assert basis.directions.dtype == torch.float64


def test_directions_without_energy_are_zero_not_nan():
    weight, _ = random_layer(4, 9)
    weight[2:] = 0
    basis = eigenbasis(weight, torch.eye(4, dtype=torch.float64))
    assert torch.isfinite(basis.directions).all()
    assert float(basis.singular_values[2:].max()) < 1e-6


def test_weighted_tokens_shrink_by_how_many_count():
    gram = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    alike = shrunk_for_weights(gram, torch.ones(50))
    torch.testing.assert_close(alike, gram + 0.5 * 2 / 50 * gram.diagonal().diag())
    one = shrunk_for_weights(gram, torch.eye(50)[0] * 50)
    torch.testing.assert_close(one, gram + 0.5 * 2 * gram.diagonal().diag())
    assert torch.isfinite(shrunk_for_weights(gram, torch.zeros(50))).all()
