import pytest
import torch

from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS
from rocket_core.linalg import factorization as factorization_module
from rocket_core.linalg.factorization import FactorizerSettings, prepare_layer
from rocket_core.linalg.whitening import eigenbasis
from rocket_core.methods import rank_search
from rocket_core.methods.rank_search import best_factorizations
from rocket_core.sizes import budget
from tests.reference import factorization as reference

SHAPES = [(48, 48), (72, 24), (24, 72)]


def random_layer(d_in, d_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(400, d_in, generator=generator, dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -1.3, d_in, dtype=torch.float64)
    weight = torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)
    return weight, inputs.T @ inputs


def prepared(weight, gram, dtype=torch.float64, **settings):
    return prepare_layer(weight, eigenbasis(weight, gram), FactorizerSettings(**settings), dtype=dtype)


def profile(layer, objective, ratios=PROFILE_RATIOS, **options):
    """By rising ratio."""
    found = best_factorizations(layer, ratios, PROFILE_RANK_NNZ_RATIOS, objective=objective, **options)
    return list(found)[::-1]


def kept_parameters(factorization):
    return factorization.rank * factorization.layer.weight.shape[0] + factorization.nnz


def stored_bytes(factorization, itemsize):
    mask = 0 if factorization.support is None else factorization.coefficients.shape[1] * -(-factorization.rank // 8)
    return itemsize * kept_parameters(factorization) + mask


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("objective", ["weight", "whitened"])
def test_it_finds_the_best_of_the_full_grid_at_every_ratio(shape, objective):
    weight, gram = random_layer(*shape)
    found = profile(prepared(weight, gram), objective)
    assert len(found) == len(PROFILE_RATIOS)
    for ratio, factorization in zip(PROFILE_RATIOS, found, strict=True):
        shapes = budget.candidate_shapes(*shape, ratio, PROFILE_RANK_NNZ_RATIOS)
        table = reference.profile(weight, gram, shapes)
        best = min(errors[objective == "whitened"] for errors in table.values())
        allowed = budget.parameter_budget(shape[0] * shape[1], ratio)
        assert allowed - shape[1] < kept_parameters(factorization) <= allowed
        error = factorization.weight_error() if objective == "weight" else factorization.reconstruction_error
        # A descent may end in a dent of a nearly flat valley; its possible cost is bounded here.
        assert error <= best * 1.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_it_finds_the_best_of_the_full_grid_by_stored_bytes(shape, itemsize):
    weight, gram = random_layer(*shape)
    found = profile(prepared(weight, gram), "whitened", itemsize=itemsize)
    assert len(found) == len(PROFILE_RATIOS)
    for ratio, factorization in zip(PROFILE_RATIOS, found, strict=True):
        allowed = budget.parameter_budget(shape[0] * shape[1] * itemsize, ratio)
        # With dense coefficients, the rest is too little for another atom.
        unused = shape[1] * itemsize if factorization.support is not None else (sum(shape) + 1) * itemsize
        assert allowed - unused < stored_bytes(factorization, itemsize) <= allowed
        shapes = budget.candidate_shapes(*shape, ratio, PROFILE_RANK_NNZ_RATIOS, itemsize=itemsize)
        best = min(error for _, error in reference.profile(weight, gram, shapes).values())
        assert factorization.reconstruction_error <= best * 1.01


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_errors_equal_the_explicit_reconstruction(shape):
    weight, gram = random_layer(*shape)
    found = profile(prepared(weight, gram), "weight")
    table = reference.profile(weight, gram, [(f.rank, f.nnz) for f in found])
    for factorization in found:
        weight_error, whitened_error = table[factorization.rank, factorization.nnz]
        assert factorization.weight_error() == pytest.approx(weight_error, rel=1e-6)
        assert factorization.reconstruction_error == pytest.approx(whitened_error, rel=1e-6)


def test_float32_profile_deviates_by_less_than_a_thousandth():
    weight, gram = random_layer(72, 48)
    single = profile(prepared(weight, gram, torch.float32), "whitened")
    double = profile(prepared(weight, gram), "whitened")
    for fast, exact in zip(single, double, strict=True):
        assert fast.reconstruction_error == pytest.approx(exact.reconstruction_error, rel=1e-3)


def test_factorizations_lose_parameters_and_gain_error():
    found = profile(prepared(*random_layer(48, 48)), "whitened")
    assert len(found) == len(PROFILE_RATIOS)
    kept = [kept_parameters(factorization) for factorization in found]
    errors = [factorization.reconstruction_error for factorization in found]
    assert kept == sorted(kept, reverse=True)
    assert errors == sorted(errors)


def test_descent_measures_a_fraction_of_the_grid(monkeypatch):
    calls = []
    factorize = rank_search.factorize_layer
    monkeypatch.setattr(
        rank_search, "factorize_layer", lambda *args, **more: calls.append(args[1:]) or factorize(*args, **more)
    )
    profile(prepared(*random_layer(96, 96)), "weight")
    grid = sum(len(budget.candidate_shapes(96, 96, ratio, PROFILE_RANK_NNZ_RATIOS)) for ratio in PROFILE_RATIOS)
    assert len(calls) == len(set(calls))
    assert len(calls) < grid / 2


def test_only_the_best_of_each_ratio_is_swept(monkeypatch):
    calls = []
    sweep = factorization_module.sweep
    monkeypatch.setattr(factorization_module, "sweep", lambda given: calls.append(given) or sweep(given))
    layer = prepared(*random_layer(48, 48), sweeps=2)
    swept = profile(layer, "whitened", ratios=(0.3, 0.6))
    assert len(calls) == 4
    plain = profile(prepared(*random_layer(48, 48)), "whitened", ratios=(0.3, 0.6))
    for before, after in zip(plain, swept, strict=True):
        assert (after.rank, after.nnz) == (before.rank, before.nnz)
        assert after.reconstruction_error < before.reconstruction_error


@pytest.mark.parametrize(
    ("part", "count", "swept"), [(1 / 1.1, 3, True), (1 / 1.4, 1, False), (1 / 1.6, 1, False)], ids=str
)
def test_hopeless_shapes_are_not_swept_and_end_the_search(part, count, swept):
    ratios = (0.2, 0.4, 0.6)
    plain = profile(prepared(*random_layer(48, 48)), "whitened", ratios)
    competing_errors = [part * factorization.reconstruction_error for factorization in plain]
    found = profile(prepared(*random_layer(48, 48), sweeps=1), "whitened", ratios, competing_errors=competing_errors)
    assert len(found) == count
    for before, after in zip(plain[-count:], found, strict=True):
        assert (after.rank, after.nnz) == (before.rank, before.nnz)
        gained = after.reconstruction_error < before.reconstruction_error * (1 - 1e-6)
        assert gained == swept


def test_a_layer_too_small_to_factorize_has_no_candidate():
    assert profile(prepared(*random_layer(1, 1)), "weight") == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_a_ratio_may_win_up_to_its_least_error(shape, ratio):
    layer = prepared(*random_layer(*shape))
    [best] = profile(layer, "whitened", (ratio,))
    for part, wins in ((1 + 1e-6, True), (1 - 1e-2, False), (0.5, False)):
        error = part * best.reconstruction_error
        assert rank_search.may_win(layer, ratio, PROFILE_RANK_NNZ_RATIOS, error) == wins


def test_sweeps_let_larger_errors_win():
    weight, inputs = random_layer(48, 48)
    [best] = profile(prepared(weight, inputs), "whitened", (0.5,))
    for sweeps, wins in ((0, False), (1, True)):
        layer = prepared(weight, inputs, sweeps=sweeps)
        error = 0.9 * best.reconstruction_error
        assert rank_search.may_win(layer, 0.5, PROFILE_RANK_NNZ_RATIOS, error) == wins


def test_a_ratio_without_shapes_cannot_win():
    assert not rank_search.may_win(prepared(*random_layer(4, 4)), 0.999, (1.0,), 1.0)
