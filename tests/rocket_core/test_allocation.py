import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocket_core.allocation import (
    Allocation,
    allocate,
    knapsack,
    labels,
    reachable_ratio,
    smallest_cap,
    solve_knapsack,
)
from rocket_core.budget import parameter_budget
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.report import AllocationReport
from tests.reference import knapsack as reference

many = settings(max_examples=400, deadline=None)


@st.composite
def instances(draw):
    """Few layers, with the cost structures that real profiles and mean ones have."""
    layers, candidates = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def table(elements):
        row = st.lists(elements, min_size=candidates, max_size=candidates)
        return draw(st.lists(row, min_size=layers, max_size=layers))

    costs = np.array(table(st.integers(0, 12)), dtype=np.int64)
    structure = draw(st.sampled_from(["small", "wide", "common unit", "nearly a common unit", "equal layers"]))
    if structure == "wide":
        costs = np.array(table(st.integers(0, 10**12)), dtype=np.int64)
    elif structure == "common unit":
        costs *= 1000
    elif structure == "nearly a common unit":
        costs = costs * 1000 + np.array(table(st.integers(0, 2)), dtype=np.int64)
    elif structure == "equal layers":
        costs[:] = costs[:1]
    kind = draw(st.sampled_from(["any", "tied", "falling with cost", "fixed charge"]))
    if kind == "any":
        errors = np.array(table(st.floats(0, 1)))
    elif kind == "tied":
        errors = np.array(table(st.integers(0, 3)), dtype=np.float64)
    else:
        removed = 1 - costs / max(1, costs.max())
        errors = removed + 0.3 * (removed > 0) * (kind == "fixed charge")
    absent = np.array(table(st.sampled_from([False, False, False, True])))
    errors[absent] = np.inf
    budget = draw(st.integers(0, int(costs.max(axis=1).sum()) + 1))
    return costs, errors, budget


def assert_optimal(solution, costs, errors, budget, optimum):
    if optimum is None:
        assert solution is None
        return
    rows = np.arange(len(costs))
    assert solution.total_cost == sum(int(cost) for cost in costs[rows, solution.choices]) <= budget
    assert solution.total_error == pytest.approx(errors[rows, solution.choices].sum(), rel=1e-12, abs=1e-300)
    assert solution.total_error == pytest.approx(optimum, rel=1e-11, abs=1e-300)
    assert solution.proven
    assert solution.lower_bound == solution.total_error


@many
@given(instances())
def test_finds_the_optimum_of_brute_force_and_never_exceeds_the_budget(instance):
    assert_optimal(solve_knapsack(*instance), *instance, reference.brute_force(*instance))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(instance=instances(), width=st.integers(1, 3), first_frontier=st.integers(0, 3))
def test_finds_the_optimum_with_every_device_of_large_searches(monkeypatch, instance, width, first_frontier):
    monkeypatch.setattr(knapsack, "_FIRST_LAYERS", 1)
    monkeypatch.setattr(knapsack, "_FIRST_WIDTH", width)
    monkeypatch.setattr(labels, "_FIRST_FRONTIER", first_frontier)
    # What otherwise serves only large searches.
    monkeypatch.setattr(labels, "_SORT_ALL", 0)
    monkeypatch.setattr(labels, "_LONG_SUM", 0)
    monkeypatch.setattr(labels, "_SUM_ANEW", 2)
    assert_optimal(solve_knapsack(*instance), *instance, reference.brute_force(*instance))


@settings(max_examples=100, deadline=None)
@given(instances())
def test_error_does_not_rise_as_the_budget_grows(instance):
    costs, errors, _ = instance
    budgets = np.unique(np.linspace(0, costs.max(axis=1).sum(), 9).astype(int)).tolist()
    solutions = [solve_knapsack(costs, errors, budget) for budget in budgets]
    found = [np.inf if solution is None else solution.total_error for solution in solutions]
    assert all(later <= earlier * (1 + 1e-11) for earlier, later in itertools.pairwise(found))


@pytest.fixture(params=["small searches", "large searches"])
def devices(request, monkeypatch):
    """What otherwise serves only large searches, applied to all."""
    if request.param == "large searches":
        monkeypatch.setattr(labels, "_FIRST_FRONTIER", 1)
        monkeypatch.setattr(labels, "_SORT_ALL", 0)
        monkeypatch.setattr(labels, "_LONG_SUM", 0)
        monkeypatch.setattr(labels, "_SUM_ANEW", 5)


def medium(kind, seed, layers=30, candidates=10):
    generator = np.random.default_rng(seed)
    if kind == "unrelated":
        return generator.integers(0, 60, (layers, candidates)), generator.random((layers, candidates))
    if kind == "profiles":  # a dense candidate, then equal steps of the ratio, rounded to whole parameters
        sizes = generator.choice([401, 803, 1203], (layers, 1))
        costs = sizes - -(-sizes * np.arange(candidates) // 20)
        noise = generator.normal(1, 0.05, (layers, candidates))
        return costs, noise * (1 - costs / sizes) * np.exp(generator.normal(0, 0.4, (layers, 1)))
    if kind == "fixed charge":
        sizes = generator.integers(40, 90, (layers, 1))
        kept = np.sort(generator.uniform(0.3, 1, (layers, candidates)), axis=1)
        kept[:, -1] = 1
        return (kept * sizes).astype(np.int64), np.where(kept < 1, 1 - kept + 0.1, 0)
    # Equal layers, and an error that nothing but the cost decides.
    costs = np.sort(generator.integers(0, 60, (1, candidates)), axis=1).repeat(layers, axis=0)
    return costs, (60.0 - costs) ** (2 if kind == "equal layers" else 1)


@pytest.mark.parametrize("kind", ["unrelated", "profiles", "fixed charge", "equal layers", "equal layers, linear"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("devices")
def test_finds_the_optimum_of_the_plain_dynamic_programme(kind, seed):
    costs, errors = medium(kind, seed)
    low, high = int(costs.min(axis=1).sum()), int(costs.max(axis=1).sum())
    for budget in np.linspace(low, high, 7).astype(int).tolist():
        optimum = reference.dynamic_programme(costs, errors, budget)
        assert_optimal(solve_knapsack(costs, errors, budget), costs, errors, budget, optimum)


@pytest.mark.parametrize("kind", ["equal layers", "equal layers, linear"])
def test_many_equal_layers_do_not_multiply_the_work(kind):
    costs, errors = medium(kind, seed=0, layers=300, candidates=15)
    budget = int(costs.sum()) // 15 + 1
    optimum = reference.dynamic_programme(costs, errors, budget)
    assert_optimal(solve_knapsack(costs, errors, budget), costs, errors, budget, optimum)


def test_costs_of_a_trillion_are_exact():
    costs, errors = medium("unrelated", seed=5)
    budget, scale = 700, 10**12
    small = solve_knapsack(costs, errors, budget)
    huge = solve_knapsack(costs * scale + 1, errors, budget * scale + len(costs))
    assert huge.total_error == pytest.approx(small.total_error, rel=1e-12)
    assert huge.total_cost == small.total_cost * scale + len(costs)
    # One parameter less for all, and that choice no longer fits.
    tight = solve_knapsack(costs * scale + 1, errors, huge.total_cost - 1)
    assert tight.total_error > small.total_error


@pytest.mark.parametrize("kind", ["profiles", "fixed charge"])
def test_an_exhausted_search_returns_a_valid_bound_and_claims_no_proof(monkeypatch, kind):
    monkeypatch.setattr(knapsack, "_FIRST_WIDTH", 1)
    monkeypatch.setattr(knapsack, "_MAX_WIDTH", 1)
    outcomes = set()
    for seed in range(10):
        costs, errors = medium(kind, seed)
        budget = int(costs.mean(axis=1).sum())
        optimum = reference.dynamic_programme(costs, errors, budget)
        solution = solve_knapsack(costs, errors, budget)
        assert solution.total_cost <= budget
        assert 0 < solution.lower_bound <= optimum * (1 + 1e-11)
        assert optimum * (1 - 1e-11) <= solution.total_error < optimum * 1.1
        assert solution.proven == (solution.lower_bound == solution.total_error)
        outcomes.add(solution.proven)
    assert False in outcomes


def test_a_search_remembers_a_bounded_number_of_labels(monkeypatch):
    frontiers = []

    class Recorded(labels._Frontier):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            frontiers.append(self)

    def remembered():
        stored = [sum(len(origin) for _, origin, _ in frontier._history) for frontier in frontiers]
        return max(front + back for front, back in zip(stored[::2], stored[1::2], strict=True))

    monkeypatch.setattr(labels, "_Frontier", Recorded)
    generator = np.random.default_rng(0)
    sizes = generator.integers(10**6, 10**7, (30, 1))
    kept = generator.uniform(0.3, 0.95, (30, 10))
    kept[:, 0] = 1
    costs, errors = (kept * sizes).astype(np.int64), np.where(kept < 1, 1.1 - kept, 0)
    budget = int(0.65 * sizes.sum())
    unbounded = solve_knapsack(costs, errors, budget)
    limit = 2**5
    assert remembered() > 20 * limit
    frontiers.clear()
    monkeypatch.setattr(labels, "_MAX_LABELS", limit)
    bounded = solve_knapsack(costs, errors, budget)
    assert remembered() <= 2 * limit
    assert bounded.lower_bound <= unbounded.total_error <= bounded.total_error


@pytest.mark.parametrize(
    ("costs", "errors", "budget", "choices"),
    [
        ([[5]], [[0.5]], 5, [0]),
        ([[5]], [[0.5]], 4, None),
        ([[0, 0]], [[0.5, 0.25]], 0, [1]),
        ([[0, 7]], [[0.0, 0.0]], 9, [0]),
        ([[3, 3, 9]], [[0.4, 0.2, 0.3]], 9, [1]),
        ([[0, 9, 10]], [[1.0, 0.99, 0.0]], 9, [1]),
        ([[1, 2], [1, 2]], [[1.0, np.inf], [1.0, 0.0]], 10**15, [0, 1]),
        ([[1, 2], [1, 2]], [[np.inf, np.inf], [1.0, 0.0]], 10**15, None),
        ([[1, 2]], [[1.0, 0.0]], -1, None),
    ],
    ids=[
        "one candidate",
        "too dear",
        "free",
        "tie",
        "dominated",
        "far from the hull",
        "absent",
        "all absent",
        "negative budget",
    ],
)
def test_corner_cases(costs, errors, budget, choices):
    solution = solve_knapsack(np.array(costs), np.array(errors), budget)
    assert (solution and solution.choices.tolist()) == choices


def test_inputs_are_left_as_they_were():
    costs, errors = medium("profiles", seed=0)
    before = costs.copy(), errors.copy()
    solve_knapsack(costs, errors, int(costs.mean(axis=1).sum()))
    smallest_cap(costs, errors, int(costs.mean(axis=1).sum()))
    np.testing.assert_array_equal(costs, before[0])
    np.testing.assert_array_equal(errors, before[1])


@many
@given(instances())
def test_smallest_cap_is_exact(instance):
    costs, errors, budget = instance
    cap = smallest_cap(costs, errors, budget)
    expected = reference.smallest_cap(costs, errors, budget)
    assert cap == (np.inf if expected is None else expected)
    if np.isfinite(cap):
        assert reference.cap_is_feasible(costs, errors, budget, cap)
        assert not reference.cap_is_feasible(costs, errors, budget, np.nextafter(cap, -1))


def profile(name, candidates, d_in=10, d_out=10):
    """A layer from (kept parameters, weight error, reconstruction error), dense first."""
    return LayerProfile(
        name=name,
        d_in=d_in,
        d_out=d_out,
        input_group=name,
        tokens=7,
        candidates=tuple(
            Candidate(
                kind="factored" if index else "dense",
                rank=1 if index else None,
                nnz=1 if index else None,
                kept_parameters=kept,
                stored_bytes=2 * kept,
                weight_error=weight_error,
                reconstruction_error=reconstruction_error,
            )
            for index, (kept, weight_error, reconstruction_error) in enumerate(candidates)
        ),
    )


LAYERS = (
    profile("q", [(100, 0.0, 0.0), (80, 0.2, 0.3), (60, 0.3, 0.35), (50, 0.29, 0.5), (40, 0.5, 0.4)]),
    profile("k", [(100, 0.0, 0.0), (80, 0.05, 0.2), (60, 0.2, 0.5), (40, 0.4, 0.9)]),
    profile("down", [(200, 0.0, 0.0), (160, 0.3, 0.1), (120, 0.35, 0.2)], d_out=20),
)


def feasible_choices(profiles, budget):
    for choice in itertools.product(*(range(len(layer.candidates)) for layer in profiles)):
        chosen = [layer.candidates[index] for layer, index in zip(profiles, choice, strict=True)]
        if sum(candidate.kept_parameters for candidate in chosen) <= budget:
            yield chosen


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.1, 0.25, 0.3, 0.45, 0.5])
@pytest.mark.parametrize("slack", [0.0, 0.01, 1.0])
def test_weight_objective_is_the_least_sum_under_the_cap(ratio, slack):
    allocation = allocate(LAYERS, ratio, objective="weight", cap_slack=slack)
    budget = parameter_budget(400, ratio)
    smallest = min(max(c.weight_error for c in chosen) for chosen in feasible_choices(LAYERS, budget))
    sums = [
        sum(c.weight_error for c in chosen)
        for chosen in feasible_choices(LAYERS, budget)
        if max(c.weight_error for c in chosen) <= smallest * (1 + slack)
    ]
    chosen = [layer.candidates[index] for layer, index in zip(LAYERS, allocation.choices, strict=True)]
    assert allocation.budget == budget
    assert allocation.compressible_parameters == 400
    assert allocation.kept_parameters == sum(c.kept_parameters for c in chosen) <= budget
    assert allocation.total_error == pytest.approx(min(sums))
    assert allocation.total_error == pytest.approx(sum(c.weight_error for c in chosen))
    assert allocation.lower_bound == allocation.total_error
    assert allocation.proven
    if ratio:
        assert allocation.smallest_alpha * allocation.reference_error == pytest.approx(smallest)
        assert allocation.alpha == pytest.approx(allocation.smallest_alpha * (1 + slack))
        assert all(c.weight_error <= allocation.alpha * allocation.reference_error * (1 + 1e-12) for c in chosen)


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.25, 0.3, 0.5])
def test_whitened_objective_is_the_least_sum_of_squares_without_a_cap(ratio):
    allocation = allocate(LAYERS, ratio, objective="whitened", cap_slack=0.01)
    choices = feasible_choices(LAYERS, parameter_budget(400, ratio))
    assert allocation.total_error == pytest.approx(
        min(sum(c.reconstruction_error**2 for c in chosen) for chosen in choices)
    )
    assert (allocation.reference_error, allocation.smallest_alpha, allocation.alpha) == (None, None, None)


def test_reference_error_is_the_mean_under_uniform_compression():
    # At 0.3 a layer of 100 may keep 70, one of 200 may keep 140.
    assert allocate(LAYERS, 0.3, objective="weight", cap_slack=0.0).reference_error == pytest.approx(
        (0.3 + 0.2 + 0.35) / 3
    )
    # At 0.5 the last layer has no candidate of 100 or fewer; its smallest stands in.
    assert allocate(LAYERS, 0.5, objective="weight", cap_slack=0.0).reference_error == pytest.approx(
        (0.5 + 0.4 + 0.35) / 3
    )


def test_at_ratio_zero_every_layer_stays_dense():
    allocation = allocate(LAYERS, 0.0, objective="weight", cap_slack=0.01)
    assert allocation.choices == (0, 0, 0)
    assert allocation.kept_parameters == allocation.budget == 400
    assert (allocation.reference_error, allocation.smallest_alpha, allocation.alpha) == (0, 0, 0)


@pytest.mark.parametrize("objective", ["weight", "whitened"])
def test_a_ratio_out_of_reach_names_one_that_can_be_typed(objective):
    with pytest.raises(
        InfeasibleBudgetError, match="200 of the 400 compressible parameters, and the smallest"
    ) as error:
        allocate(
            (*LAYERS[:2], profile("down", [(200, 0.0, 0.0), (121, 0.35, 0.2)], d_out=20)),
            0.5,
            objective=objective,
            cap_slack=0.0,
        )
    assert error.value.nearest_ratio == 0.4975
    assert "0.4975" in str(error.value)


@many
@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["weight", "whitened"]),
)
def test_the_nearest_ratio_works_when_typed_back(kept, objective):
    profiles = [
        profile(f"layer{index}", [(10**6, 0, 0), *((size, 0.5, 0.5) for size in sizes)], d_in=1000, d_out=1000)
        for index, sizes in enumerate(kept)
    ]
    nearest = reachable_ratio(profiles)
    assert 0 <= nearest < 1
    assert nearest == float(f"{nearest:.4f}")
    allocation = allocate(profiles, nearest, objective=objective, cap_slack=0.0)
    assert allocation.kept_parameters <= allocation.budget
    if nearest < 0.9998:
        with pytest.raises(InfeasibleBudgetError) as error:
            allocate(profiles, round(nearest + 1e-4, 4), objective=objective, cap_slack=0.0)
        assert error.value.nearest_ratio == nearest


@pytest.mark.parametrize(("ratio", "slack"), [(1.0, 0.0), (-0.1, 0.0), (float("nan"), 0.0), (0.3, -1.0)])
def test_a_setting_out_of_range_is_refused(ratio, slack):
    with pytest.raises(InvalidConfigError, match="out of range"):
        allocate(LAYERS, ratio, objective="weight", cap_slack=slack)


def test_no_layers_are_refused():
    with pytest.raises(InvalidConfigError, match="no layer"):
        allocate([], 0.3, objective="weight", cap_slack=0.0)


def test_an_allocation_survives_storage_and_fills_the_report():
    allocation = allocate(LAYERS, 0.3, objective="weight", cap_slack=0.01)
    assert Allocation.model_validate_json(allocation.model_dump_json()) == allocation
    shared = AllocationReport.model_fields.keys() & Allocation.model_fields.keys()
    assert shared == AllocationReport.model_fields.keys()
    AllocationReport.model_validate({name: getattr(allocation, name) for name in shared})


def test_nothing_heavier_than_numpy_is_loaded():
    program = "import sys, rocket_core.allocation; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded
    assert not {"torch", "scipy", "numba", "transformers"} & set(loaded)
