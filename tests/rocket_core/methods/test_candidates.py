"""Statements of methods about candidates, compared with the explicit weight and with the written tensors."""

from dataclasses import replace

import pytest
import torch

from rocket_core.config import ONE_FORMAT_METHODS, PROFILE_RANK_NNZ_RATIOS, CompressionConfig
from rocket_core.errors import RocketError
from rocket_core.layers import LayerFactors, compose_weight, layer_tensors
from rocket_core.linalg.factorization import FactorizerSettings
from rocket_core.methods import METHODS, dictionary, method_for
from rocket_core.sizes import budget
from tests.reference import pruning
from tests.reference.problems import TOKENS, example

SHAPES = [(24, 24), (36, 12), (12, 36)]
ROCKET = {"kinds": ("low_rank", "factored", "sparse")}
UNIFORM = sorted(METHODS.keys() - {"rocket"} - ONE_FORMAT_METHODS)
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def method(name="rocket", *, itemsize=2, **settings):
    if name == "rocket":
        settings = {**ROCKET, "objective": "whitened", **settings}
    return method_for(CompressionConfig(**{"ratio": 0.4, "method": name, **settings}), itemsize)


def dense(factors):
    return compose_weight(factors.dictionary, factors.coefficients, torch.float64).T


def check(candidate, layer, factors, itemsize, part=slice(None), *, measured=True):
    """Check errors and sizes of a candidate against its factors; unmeasured errors must only be given."""
    approximation = dense(factors)
    error, relative, distance, loss = layer.errors(approximation, part)
    assert (candidate.loss is None) == (loss is None)
    if measured:
        assert candidate.reconstruction_error == pytest.approx(relative, rel=1e-6, abs=1e-7)
        assert candidate.weight_error == pytest.approx(distance, rel=1e-5, abs=1e-7)
        assert loss is None or candidate.loss == pytest.approx(loss, rel=2e-6)
    tensors = layer_tensors(factors, DTYPES[itemsize])
    assert tensors["weight"].numel() == candidate.nnz
    assert sum(tensors[name].numel() for name in ("weight", "weight_u") if name in tensors) == candidate.kept_parameters
    assert sum(tensor.nbytes for tensor in tensors.values()) == candidate.stored_bytes
    assert (candidate.kind == "sparse") == (factors.dictionary is None)
    if factors.dictionary is not None:
        assert candidate.rank == factors.dictionary.shape[1]
        assert (candidate.kind == "low_rank") == ("weight_mask" not in tensors)
    return error


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", [None, 0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sweeps": 2, "budget": "bytes", "kinds": ("low_rank", "factored")},
        {"kinds": ("low_rank",)},
        {"sparsification": "per-row"},
    ],
)
def test_candidates_match_the_result_of_compression(shape, weights, settings):
    layer = example(shape[0], shape[1:], weights=weights)
    rocket = method(itemsize=4, **settings)
    found = rocket.profile(layer.problem)
    assert {candidate.kind for candidate in found} <= set(rocket.config.kinds)
    assert found
    for candidate in found:
        compressed = rocket.compress(layer.problem, candidate)
        error = check(candidate, layer, compressed.factors, 4, measured=candidate.kind != "sparse")
        assert float(compressed.errors.sum()) == pytest.approx(error, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", UNIFORM)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.1, 0.37, 0.6])
@pytest.mark.parametrize("budget_unit", ["parameters", "bytes"])
def test_uniform_methods_have_one_candidate_within_the_ratio(name, shape, ratio, budget_unit):
    layer = example(shape[0], shape[1:])
    uniform = method(name, ratio=ratio, budget=budget_unit)
    found = uniform.profile(layer.problem)
    size = shape[0] * shape[1]
    for candidate in found:
        check(candidate, layer, uniform.compress(layer.problem, candidate).factors, 2)
        assert candidate.kept_parameters <= budget.parameter_budget(size, ratio)
        if budget_unit == "bytes":
            assert candidate.stored_bytes <= budget.parameter_budget(2 * size, ratio)
    assert len(found) == 1
    # At least what the next atom, or the next nonzero of every output, would take.
    cost = found[0].stored_bytes / 2 if budget_unit == "bytes" else found[0].kept_parameters
    assert cost > budget.parameter_budget(size, ratio) - sum(shape) - 1


@pytest.mark.parametrize("name", ["magnitude", "wanda"])
def test_pruning_without_refit_keeps_weights_unchanged(name):
    layer = example(20, (12,))
    [candidate] = method(name, ratio=0.45).profile(layer.problem)
    factors = method(name).compress(layer.problem, candidate).factors
    weight = layer.problem.weight
    tokens = layer.inputs[:TOKENS]
    expected = (
        pruning.magnitude(weight, candidate.nnz)
        if name == "magnitude"
        else pruning.wanda(tokens, weight, candidate.nnz)
    )
    assert torch.equal(factors.support, expected)
    assert torch.equal(factors.coefficients, weight * expected)


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform_methods_have_no_candidate_at_ratio_zero(name):
    uniform = method(name, ratio=0.0)
    assert uniform.uniform
    assert uniform.profile(example(12, (12,)).problem) == []


@pytest.mark.parametrize("settings", [{"preset": "best"}, {"kinds": ("low_rank", "factored", "shared", "sparse")}])
def test_a_uniform_method_ignores_the_kinds_of_rocket(settings):
    if "preset" not in settings:
        settings = {**settings, "objective": "whitened"}
    uniform = method("rocket-uniform", ratio=0.4, **settings)
    assert not uniform.shares
    [candidate] = uniform.profile(example(24, (24,)).problem)
    assert candidate.kind == "factored"


@pytest.mark.parametrize("name", ["rocket", *UNIFORM])
@pytest.mark.parametrize("nonzeros", [1, 7])
def test_enlarged_candidates_never_exceed_their_nonzeros(name, nonzeros):
    layer = example(24, (24,))
    one = method(name)
    for candidate in one.profile(layer.problem):
        if candidate.kind == "low_rank":
            continue
        larger = candidate.model_copy(update={"nnz": candidate.nnz + nonzeros})
        compressed = one.compress(layer.problem, larger)
        tensors = layer_tensors(compressed.factors, torch.float32)
        assert candidate.nnz <= tensors["weight"].numel() <= larger.nnz
        if name in {"rocket", "rocket-uniform", "magnitude", "wanda"}:
            assert tensors["weight"].numel() == larger.nnz


@pytest.mark.parametrize("shape", [(36, 12), (12, 12)])
@pytest.mark.parametrize("weights", [None, 2])
def test_output_gram_and_gram_give_the_same_factors(shape, weights):
    both = [example(shape[0], shape[1:], weights=weights, output_gram=given) for given in (False, True)]
    rocket = method(kinds=("low_rank", "factored"))
    for candidate, other in zip(*(rocket.profile(layer.problem) for layer in both), strict=True):
        assert (candidate.kind, candidate.rank, candidate.nnz) == (other.kind, other.rank, other.nnz)
        assert candidate.reconstruction_error == pytest.approx(other.reconstruction_error, rel=1e-6)
        check(other, both[0], rocket.compress(both[1].problem, other).factors, 2)


@pytest.mark.parametrize("weights", [None, 2])
@pytest.mark.parametrize("budget_unit", ["parameters", "bytes"])
def test_shared_candidates_match_compression_of_each_member(weights, budget_unit):
    widths = (16, 8, 12)
    layer = example(20, widths, weights=weights)
    rocket = method(kinds=("shared",), sweeps=1, budget=budget_unit)
    found = rocket.share(layer.problem, "q")
    found += dictionary.share(
        layer.problem,
        dictionary.Search(
            settings=FactorizerSettings(),
            ratios=(0.3,),
            shapes=(1.0,),
            stored_itemsize=2,
            budget_itemsize=rocket.budget_itemsize,
        ),
        dictionary_owner="q",
    )
    assert {candidate.kind for candidate in found} == {"low_rank", "factored"}
    for shared in found:
        compressed = rocket.compress_shared(layer.problem, shared.rank, shared.nnz)
        begin = 0
        for index, (member, width) in enumerate(zip(shared.members, widths, strict=True)):
            part = slice(begin, begin + width)
            begin += width
            factors = LayerFactors(
                dictionary=compressed.factors.dictionary,
                coefficients=compressed.factors.coefficients[:, part],
                support=None if compressed.factors.support is None else compressed.factors.support[:, part],
                dictionary_owner="q" if index else None,
            )
            if shared.kind == "factored" and bool(factors.support.all()):
                continue  # written without the mask that is counted for it
            error = check(member, layer, factors, 2, part)
            assert float(compressed.errors[part].sum()) == pytest.approx(error, rel=1e-6, abs=1e-12)
            assert member.dictionary == "q"
        assert shared.kept_parameters == shared.rank * 20 + shared.nnz
    by_size = [shared.kept_parameters for shared in found[:-1]]
    assert by_size == sorted(by_size, reverse=True)


@pytest.mark.parametrize("part", [1.01, 0.5])
def test_shared_dictionaries_are_found_if_members_are_known(part):
    widths = (16, 8, 12)
    plain, known = (example(20, widths, weights=2).problem for _ in range(2))
    starts = [0, 16, 24]
    known.members = tuple(
        replace(
            known,
            weight=known.weight[:, start : start + width],
            output_weights=known.output_weights[start : start + width],
            output_widths=(width,),
        ).as_member()
        for start, width in zip(starts, widths, strict=True)
    )
    search = dictionary.Search(
        settings=FactorizerSettings(),
        ratios=(0.3, 0.5),
        shapes=PROFILE_RANK_NNZ_RATIOS,
        stored_itemsize=2,
        budget_itemsize=None,
    )
    smallest = dictionary.share(plain, search, dictionary_owner="q")[-1]
    errors = [member.reconstruction_error for member in smallest.members]
    competing = [[error, part * error] for error in errors]
    found = [dictionary.share(one, search, dictionary_owner="q", competing_errors=competing) for one in (plain, known)]
    assert found[0] == found[1]
    assert bool(found[0]) == (part > 1)


def test_an_unimportant_member_keeps_one_coefficient():
    layer = example(20, (16, 8, 8), weights=0)
    layer.problem.output_weights[16:] *= 1e-4
    rocket = method(kinds=("shared",), sweeps=2)
    found = rocket.share(layer.problem, "q")
    assert len(found) == 14
    assert any(shared.members[1].nnz == shared.members[2].nnz == 1 for shared in found)
    for shared in found:
        factors = rocket.compress_shared(layer.problem, shared.rank, shared.nnz).factors
        counts = [int(part.sum()) for part in factors.support.split([16, 8, 8], dim=1)]
        assert counts == [member.nnz for member in shared.members]
        assert min(counts) >= 1
        assert not factors.coefficients[~factors.support].any()
        error, relative, _, _ = layer.errors(dense(factors))
        errors = [member.loss * 2 * TOKENS for member in shared.members]
        assert sum(errors) == pytest.approx(error, rel=1e-6)
        assert relative < 1


def test_shared_candidates_stay_within_their_ratio():
    layer = example(20, (16, 8))
    found = method(kinds=("shared",), budget="bytes").share(layer.problem, "q")
    ratios = [round(0.05 * step, 2) for step in range(1, 15)]
    assert len(found) == len(ratios)
    for ratio, shared in zip(ratios, found, strict=True):
        allowed = budget.parameter_budget(2 * 20 * 24, ratio)
        # Masks are rounded up to bytes for each output.
        assert allowed - 2 * 44 - 24 < shared.stored_bytes <= allowed


@pytest.mark.parametrize("kind", ["low_rank", "factored", "sparse"])
def test_column_weights_lower_the_error_they_weight(kind):
    weighted = example(24, (24,), weights=3)
    rocket = method(kinds=(kind,))
    plain = rocket.profile(replace(weighted.problem, output_weights=None, basis=None))
    better = 0
    for candidate, unaware in zip(rocket.profile(weighted.problem), plain, strict=True):
        without = rocket.compress(replace(weighted.problem, output_weights=None, basis=None), unaware)
        ignorant, aware = (
            weighted.errors(dense(factors))[1]
            for factors in (without.factors, rocket.compress(weighted.problem, candidate).factors)
        )
        assert aware <= ignorant * (1 + 1e-9)
        better += aware < 0.8 * ignorant
    assert better > 3


@pytest.mark.parametrize("weights", [None, 2])
def test_low_rank_candidates_are_the_best_of_their_rank(weights):
    layer = example(20, (14,), weights=weights)
    scale = torch.ones(14, dtype=torch.float64) if weights is None else layer.problem.output_weights
    values = torch.linalg.svdvals(layer.inputs @ (layer.problem.weight * scale))
    for candidate in method(kinds=("low_rank",)).profile(layer.problem):
        best = float(values[candidate.rank :].square().sum() / values.square().sum()) ** 0.5
        assert candidate.reconstruction_error == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_equal_column_weights_change_only_the_loss(weight):
    layer = example(24, (24,))
    scaled = replace(layer.problem, output_weights=torch.full((24,), weight, dtype=torch.float64), basis=None)
    rocket = method()
    for candidate, other in zip(rocket.profile(layer.problem), rocket.profile(scaled), strict=True):
        assert (candidate.kind, candidate.rank, candidate.nnz) == (other.kind, other.rank, other.nnz)
        assert candidate.reconstruction_error == pytest.approx(other.reconstruction_error, rel=1e-6)
        assert candidate.weight_error == pytest.approx(other.weight_error, rel=1e-6)
        torch.testing.assert_close(
            dense(rocket.compress(scaled, other).factors),
            dense(rocket.compress(layer.problem, candidate).factors),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("kinds", [("low_rank",), ("factored",), ("sparse",)])
def test_float32_stays_close_to_float64(kinds):
    found = [
        method(kinds=kinds, sweeps=1).profile(example(48, (40,), weights=1, precision=precision).problem)
        for precision in (torch.float32, torch.float64)
    ]
    for fast, exact in zip(*found, strict=True):
        assert (fast.rank, fast.nnz) == (exact.rank, exact.nnz)
        assert fast.reconstruction_error == pytest.approx(exact.reconstruction_error, rel=5e-3)
        assert fast.loss == pytest.approx(exact.loss, rel=1e-2)


def test_every_method_is_in_the_table():
    assert set(METHODS) == set(CompressionConfig.model_fields["method"].annotation.__args__)


def test_a_zero_layer_has_no_error():
    layer = example(12, (12,))
    layer.problem.weight.zero_()
    for name in ("rocket", *UNIFORM):
        for candidate in method(name).profile(layer.problem):
            assert candidate.reconstruction_error == candidate.weight_error == 0


def test_every_method_refuses_or_survives_a_dead_input():
    layer = example(16, (24,))
    layer.problem.statistics.gram[3] = layer.problem.statistics.gram[:, 3] = 0
    for name in ("rocket", *UNIFORM):
        try:
            found = method(name).profile(layer.problem)
        except RocketError:
            continue
        for candidate in found:
            factors = method(name).compress(layer.problem, candidate).factors
            assert torch.isfinite(dense(factors)).all()
