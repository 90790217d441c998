"""Rounding of low-rank factorizations to integer codes."""

import pytest
import torch

from rocket_core.linalg.factor_rounding import round_factors
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.linalg.rounding import RoundingGram
from rocket_core.sizes.code_format import CodeFormat
from tests.sampling import sweep

D_IN, D_OUT, RANK = 20, 28, 6


def problem(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(D_IN, D_OUT, generator=generator, dtype=torch.float64)
    sizes = torch.linspace(0.2, 3, D_IN, dtype=torch.float64)
    inputs = torch.randn(80, D_IN, generator=generator, dtype=torch.float64) * sizes
    importance = torch.rand(D_OUT, generator=generator, dtype=torch.float64) + 0.1
    return weight, inputs.T @ inputs, importance


def best_rows(weight, gram, importance, rank):
    """Return the row space of the best low-rank weight, by a singular value decomposition of S W diag(√f)."""
    scaled = torch.linalg.cholesky(gram).T @ weight * importance.sqrt()
    return torch.linalg.svd(scaled, full_matrices=False).Vh[:rank] / importance.sqrt()


def weighted_error(weight, other, gram, importance):
    removed = (weight - other) * importance.sqrt()
    return float(torch.trace(removed.T @ gram @ removed))


def rounded(seed, code_format, rank=RANK, **options):
    weight, gram, importance = problem(seed)
    rows = best_rows(weight, gram, importance, rank)
    found = round_factors(weight, RoundingGram.of(gram), importance, rows, code_format, **options)
    return found, weighted_error(weight, found.weight(torch.float64), gram, importance)


def least_error(seed, rank=RANK):
    """Return the error of the unrounded factorization, from the singular values that it leaves out."""
    weight, gram, importance = problem(seed)
    scaled = torch.linalg.cholesky(gram).T @ weight * importance.sqrt()
    return float(torch.linalg.svdvals(scaled)[rank:].square().sum())


@pytest.mark.parametrize("seed", sweep([0], soak=[1, 2]))
def test_codes_of_many_bits_have_the_least_error(seed):
    _, error = rounded(seed, CodeFormat(bits=8, group_size=4, scale_bits=16))
    assert least_error(seed) <= error <= 1.01 * least_error(seed)


@pytest.mark.parametrize("seed", sweep([0], soak=[1, 2]))
def test_fewer_bits_have_more_error_and_descent_less(seed):
    formats = [CodeFormat(bits=bits, group_size=16, scale_bits=6) for bits in (2, 3, 4)]
    at_once = [rounded(seed, code_format, improved=False)[1] for code_format in formats]
    improved = [rounded(seed, code_format)[1] for code_format in formats]
    assert at_once[0] > at_once[1] > at_once[2] > least_error(seed)
    assert all(after < before for after, before in zip(improved, at_once, strict=True))


@pytest.mark.parametrize("group_size", [4, 16, 50])
def test_stored_codes_and_scales_represent_the_factors(group_size):
    found, _ = rounded(0, CodeFormat(bits=3, group_size=group_size, scale_bits=6))
    # Atoms by input, coefficients as one sequence, output after output; scales of consecutive entries.
    for factor, shape in ((found.dictionary, (RANK, D_IN)), (found.coefficients, (RANK * D_OUT, 1))):
        stored = factor.stored()
        assert isinstance(stored, RoundedWeight)
        assert stored.shape == shape
        assert stored.scales.codes.shape == (-(-shape[0] // group_size), shape[1])
        entries = factor.weight(torch.float64).T
        expected = entries if shape[1] > 1 else entries.reshape(-1, 1)
        torch.testing.assert_close(stored.weight(torch.float64), expected, rtol=0, atol=0)
        assert int(stored.codes.min()) >= -4
        assert int(stored.codes.max()) <= 3


def test_a_weight_of_zeros_and_silent_inputs_are_rounded():
    weight, gram, importance = problem(3)
    rows = best_rows(weight, gram, importance, RANK)
    gram[:4], gram[:, :4] = 0, 0
    code_format = CodeFormat(bits=3, group_size=16, scale_bits=6)
    for given in (weight, torch.zeros_like(weight)):
        found = round_factors(given, RoundingGram.of(gram), importance, rows, code_format)
        assert bool(found.weight(torch.float64).isfinite().all())
        assert weighted_error(given, found.weight(torch.float64), gram, importance) <= weighted_error(
            given, torch.zeros_like(given), gram, importance
        )
