import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.errors import IllConditionedGramError
from rocket_core.linalg.factorization import (
    Factorization,
    FactorizerSettings,
    factorize_layer,
    prepare_layer,
    select_support,
)
from rocket_core.linalg.whitening import eigenbasis
from tests.reference import factorization as reference

SHAPES = [(16, 16), (24, 10), (10, 24)]


def random_layer(d_in, d_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(300, d_in, generator=generator, dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -1, d_in, dtype=torch.float64)
    return torch.randn(d_in, d_out, generator=generator, dtype=torch.float64), inputs.T @ inputs


def prepared(weight, gram, *, dtype=torch.float64, **settings_):
    return prepare_layer(weight, eigenbasis(weight, gram), FactorizerSettings(**settings_), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_it_agrees_with_the_paper_formula_by_formula(shape, balance):
    weight, gram = random_layer(*shape)
    rank, nnz = 7, 7 * shape[1] // 2 + 3
    factorization = factorize_layer(prepared(weight, gram, importance_balance=balance), rank, nnz)
    approximation, weight_error, whitened_error = reference.factorize(weight, gram, rank, nnz, balance=balance)
    torch.testing.assert_close(
        factorization.dictionary() @ factorization.coefficients, approximation, rtol=1e-6, atol=1e-7
    )
    assert factorization.weight_error() == pytest.approx(weight_error, rel=1e-7)
    assert factorization.reconstruction_error == pytest.approx(whitened_error, rel=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_sparsity_it_is_the_truncated_svd(shape):
    weight, gram = random_layer(*shape)
    rank = 5
    factorization = factorize_layer(prepared(weight, gram), rank, rank * shape[1])
    _, inverse, whitened = reference.whiten(weight, gram)
    left, singular_values, right = torch.linalg.svd(whitened, full_matrices=False)
    truncated = inverse @ (left[:, :rank] * singular_values[:rank]) @ right[:rank]
    assert factorization.support is None
    torch.testing.assert_close(factorization.dictionary() @ factorization.coefficients, truncated, rtol=1e-6, atol=1e-8)
    discarded = float(singular_values[rank:].square().sum() / singular_values.square().sum()) ** 0.5
    assert factorization.reconstruction_error == pytest.approx(discarded, rel=1e-9)


@given(
    rank=st.integers(1, 12),
    d_out=st.integers(1, 15),
    fraction=st.floats(0, 1),
    beta=st.sampled_from([0.0, 5e-3, 0.3]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_the_support_has_the_exact_count_and_two_stages(rank, d_out, fraction, beta, seed):
    nnz = max(1, round(fraction * rank * d_out))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rank, d_out, generator=generator, dtype=torch.float64)
    support = select_support(scores, nnz, beta)
    assert int(support.sum()) == nnz
    assert torch.equal(support, reference.support(scores, nnz, beta))


def test_support_has_the_exact_count_among_equal_scores():
    support = select_support(torch.ones(6, 5), 13, 5e-3)
    assert int(support.sum()) == 13
    assert int(support.sum(0).min()) >= 2


@given(rank=st.integers(1, 16), fraction=st.floats(0.2, 1), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_no_perturbation_of_the_dictionary_lowers_an_error(rank, fraction, seed):
    weight, gram = random_layer(16, 16, seed)
    nnz = max(rank, round(fraction * rank * 16))
    factorization = factorize_layer(prepared(weight, gram), rank, nnz)
    dictionary, coefficients = factorization.dictionary(), factorization.coefficients
    factor = reference.whiten(weight, gram)[0]
    step = 1e-3 * torch.randn(dictionary.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best = reference.errors(weight, factor, dictionary @ coefficients)
    moved = reference.errors(weight, factor, (dictionary + step) @ coefficients)
    assert moved[0] >= best[0] - 1e-9
    assert moved[1] >= best[1] - 1e-9


def test_the_error_falls_as_nonzeros_and_atoms_are_added():
    weight, gram = random_layer(20, 20)
    layer = prepared(weight, gram, importance_balance=0.0)
    by_nnz = [factorize_layer(layer, 10, nnz).reconstruction_error for nnz in range(40, 201, 20)]
    assert by_nnz == sorted(by_nnz, reverse=True)
    by_rank = [factorize_layer(layer, rank, rank * 20).reconstruction_error for rank in range(1, 21)]
    assert by_rank == sorted(by_rank, reverse=True)
    assert by_rank[-1] < 1e-6


@pytest.mark.parametrize("shape", [(96, 96), (160, 64), (64, 160)])
def test_float32_stays_close_to_float64(shape):
    weight, gram = random_layer(*shape)
    basis = eigenbasis(weight, gram)
    single = prepare_layer(weight, basis, FactorizerSettings(), dtype=torch.float32)
    double = prepare_layer(weight, basis, FactorizerSettings(), dtype=torch.float64)
    for rank, nnz in [(10, 10 * shape[1]), (40, 20 * shape[1]), (60, 35 * shape[1])]:
        fast, exact = factorize_layer(single, rank, nnz), factorize_layer(double, rank, nnz)
        assert fast.weight_error() == pytest.approx(exact.weight_error(), rel=1e-4)
        assert fast.reconstruction_error == pytest.approx(exact.reconstruction_error, rel=1e-4)
        actual = reference.errors(
            weight, reference.whiten(weight, gram)[0], (fast.dictionary() @ fast.coefficients).double()
        )
        assert fast.weight_error() == pytest.approx(actual[0], rel=1e-3)
        assert fast.reconstruction_error == pytest.approx(actual[1], rel=1e-3)


def test_float32_errors_survive_a_dominating_direction():
    weight, gram = random_layer(64, 64)
    inputs = torch.zeros(64, dtype=torch.float64)
    inputs[3] = 1e4
    gram = gram + torch.outer(inputs, inputs)
    basis = eigenbasis(weight, gram)
    single = factorize_layer(prepare_layer(weight, basis, FactorizerSettings(), dtype=torch.float32), 40, 40 * 40)
    double = factorize_layer(prepare_layer(weight, basis, FactorizerSettings(), dtype=torch.float64), 40, 40 * 40)
    assert single.reconstruction_error == pytest.approx(double.reconstruction_error, rel=1e-3)


def test_inputs_are_not_modified():
    weight, gram = random_layer(12, 12)
    basis = eigenbasis(weight, gram)
    before = [weight.clone(), basis.directions.clone(), basis.singular_values.clone()]
    layer = prepare_layer(weight, basis, FactorizerSettings(), dtype=torch.float64)
    factorization = factorize_layer(layer, 6, 40)
    importance = layer.importance.clone()
    factorization.dictionary()
    assert factorization.reconstruction_error > 0
    assert all(
        torch.equal(a, b) for a, b in zip(before, [weight, basis.directions, basis.singular_values], strict=True)
    )
    assert torch.equal(layer.importance, importance)


def test_unused_atoms_become_zero():
    weight, gram = random_layer(8, 8)
    factorization = factorize_layer(prepared(weight, gram, over_sparsification=0.0), 8, 8)
    unused = factorization.coefficients.abs().sum(1) == 0
    assert bool(unused.any())
    assert torch.equal(factorization.dictionary()[:, unused], torch.zeros(8, int(unused.sum()), dtype=torch.float64))
    assert torch.isfinite(factorization.dictionary()).all()


@pytest.mark.parametrize(
    "read", [Factorization.dictionary, Factorization.weight_error, lambda found: found.reconstruction_error]
)
def test_dependent_coefficients_are_refused(read):
    weight, gram = random_layer(8, 8)
    layer = prepared(weight, gram)
    layer.basis.directions[:, 1] = layer.basis.directions[:, 0] * (1 + 1e-16)
    layer.basis.directions[:, 2] = float("nan")
    factorization = factorize_layer(layer, 4, 32)
    with pytest.raises(IllConditionedGramError, match="rank 4 are linearly dependent; raise the ridge"):
        read(factorization)


def test_an_all_zero_layer_has_no_error():
    gram = torch.eye(6, dtype=torch.float64)
    layer = prepared(torch.zeros(6, 6, dtype=torch.float64), gram)
    factorization = factorize_layer(layer, 3, 9)
    assert factorization.weight_error() == 0.0
    assert torch.isfinite(factorization.dictionary()).all()
