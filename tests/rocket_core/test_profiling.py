import pytest
import torch

from rocket_core import budget, profiling
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS
from rocket_core.factorization import FactorizerSettings, prepare_layer
from rocket_core.profiling import profile_layer
from rocket_core.whitening import eigenbasis
from tests.reference import factorization as reference

SHAPES = [(48, 48), (72, 24), (24, 72)]


def random_layer(d_in, d_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(400, d_in, generator=generator, dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -1.3, d_in, dtype=torch.float64)
    weight = torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)
    return weight, inputs.T @ inputs


def prepared(weight, gram, dtype=torch.float64):
    return prepare_layer(weight, eigenbasis(weight, gram), FactorizerSettings(), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("objective", ["weight", "whitened"])
def test_finds_the_best_of_the_full_grid_at_every_ratio(shape, objective):
    weight, gram = random_layer(*shape)
    profile = profile_layer(prepared(weight, gram), objective=objective, itemsize=2)
    by_budget = {candidate.kept_parameters: candidate for candidate in profile[1:]}
    for ratio in PROFILE_RATIOS:
        shapes = budget.candidate_shapes(*shape, ratio, PROFILE_RANK_NNZ_RATIOS)
        table = reference.profile(weight, gram, shapes)
        best = min(errors[objective == "whitened"] for errors in table.values())
        allowed = budget.parameter_budget(shape[0] * shape[1], ratio)
        found = [candidate for kept, candidate in by_budget.items() if allowed - shape[1] < kept <= allowed]
        error = min(getattr(c, "weight_error" if objective == "weight" else "reconstruction_error") for c in found)
        # A descent may end in a dent of a nearly flat valley; what it may cost is bounded here.
        assert error <= best * 1.01


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_errors_are_those_of_the_explicit_reconstruction(shape):
    weight, gram = random_layer(*shape)
    profile = profile_layer(prepared(weight, gram), objective="weight", itemsize=2)
    table = reference.profile(weight, gram, [(c.rank, c.nnz) for c in profile[1:]])
    for candidate in profile[1:]:
        weight_error, whitened_error = table[candidate.rank, candidate.nnz]
        assert candidate.weight_error == pytest.approx(weight_error, rel=1e-6)
        assert candidate.reconstruction_error == pytest.approx(whitened_error, rel=1e-6)
        assert candidate.kept_parameters == candidate.rank * shape[0] + candidate.nnz


def test_float32_profile_deviates_by_less_than_a_thousandth():
    weight, gram = random_layer(72, 48)
    single = profile_layer(prepared(weight, gram, torch.float32), objective="whitened", itemsize=2)
    double = profile_layer(prepared(weight, gram), objective="whitened", itemsize=2)
    for fast, exact in zip(single, double, strict=True):
        assert fast.reconstruction_error == pytest.approx(exact.reconstruction_error, rel=1e-3)


def test_dense_candidate_is_free_of_error_and_keeps_everything():
    dense, *factored = profile_layer(prepared(*random_layer(24, 24)), objective="weight", itemsize=2)
    assert (dense.kind, dense.kept_parameters, dense.stored_bytes) == ("dense", 576, 1152)
    assert dense.weight_error == dense.reconstruction_error == 0
    assert all(candidate.kind == "factored" for candidate in factored)


def test_candidates_lose_parameters_and_gain_error():
    _, *factored = profile_layer(prepared(*random_layer(48, 48)), objective="whitened", itemsize=2)
    assert len(factored) == len(PROFILE_RATIOS)
    kept = [candidate.kept_parameters for candidate in factored]
    errors = [candidate.reconstruction_error for candidate in factored]
    assert kept == sorted(kept, reverse=True)
    assert errors == sorted(errors)


def test_descent_measures_a_fraction_of_the_grid(monkeypatch):
    calls = []
    factorize = profiling.factorize_layer
    monkeypatch.setattr(profiling, "factorize_layer", lambda *args: calls.append(args[1:]) or factorize(*args))
    profile_layer(prepared(*random_layer(96, 96)), objective="weight", itemsize=2)
    grid = sum(len(budget.candidate_shapes(96, 96, ratio, PROFILE_RANK_NNZ_RATIOS)) for ratio in PROFILE_RATIOS)
    assert len(calls) == len(set(calls))
    assert len(calls) < grid / 2


def test_a_layer_too_small_to_factorize_has_only_its_dense_candidate():
    profile = profile_layer(prepared(*random_layer(1, 1)), objective="weight", itemsize=4)
    assert [candidate.kind for candidate in profile] == ["dense"]
