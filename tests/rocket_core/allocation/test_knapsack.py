import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocket_core.allocation import knapsack, label_search
from rocket_core.allocation.cap import smallest_cap
from rocket_core.allocation.knapsack import solve_knapsack
from tests.reference import knapsack as reference
from tests.reference.knapsack import instances
from tests.sampling import examples


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


@settings(max_examples=examples(150), deadline=None)
@given(instances())
def test_finds_the_brute_force_optimum_within_the_budget(instance):
    assert_optimal(solve_knapsack(*instance), *instance, reference.brute_force(*instance))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(instance=instances(), width=st.integers(1, 3), first_frontier=st.integers(0, 3))
def test_finds_the_optimum_with_all_large_search_techniques(monkeypatch, instance, width, first_frontier):
    monkeypatch.setattr(knapsack, "_FIRST_LAYERS", 1)
    monkeypatch.setattr(knapsack, "_FIRST_WIDTH", width)
    monkeypatch.setattr(label_search, "_FIRST_FRONTIER", first_frontier)
    # Techniques that otherwise only large searches use.
    monkeypatch.setattr(label_search, "_SORT_ALL", 0)
    monkeypatch.setattr(label_search, "_LONG_SUM", 0)
    monkeypatch.setattr(label_search, "_SUM_ANEW", 2)
    assert_optimal(solve_knapsack(*instance), *instance, reference.brute_force(*instance))


@settings(max_examples=examples(50), deadline=None)
@given(instances())
def test_error_does_not_rise_as_the_budget_grows(instance):
    costs, errors, _ = instance
    budgets = np.unique(np.linspace(0, costs.max(axis=1).sum(), 9).astype(int)).tolist()
    solutions = [solve_knapsack(costs, errors, budget) for budget in budgets]
    found = [np.inf if solution is None else solution.total_error for solution in solutions]
    assert all(later <= earlier * (1 + 1e-11) for earlier, later in itertools.pairwise(found))


@pytest.fixture(params=["small searches", "large searches"])
def devices(request, monkeypatch):
    """Apply the techniques of large searches to all."""
    if request.param == "large searches":
        monkeypatch.setattr(label_search, "_FIRST_FRONTIER", 1)
        monkeypatch.setattr(label_search, "_SORT_ALL", 0)
        monkeypatch.setattr(label_search, "_LONG_SUM", 0)
        monkeypatch.setattr(label_search, "_SUM_ANEW", 5)


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
    # Equal layers, and an error that only depends on the cost.
    costs = np.sort(generator.integers(0, 60, (1, candidates)), axis=1).repeat(layers, axis=0)
    return costs, (60.0 - costs) ** (2 if kind == "equal layers" else 1)


@pytest.mark.parametrize("kind", ["unrelated", "profiles", "fixed charge", "equal layers", "equal layers, linear"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("devices")
def test_finds_the_optimum_of_dynamic_programming(kind, seed):
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


def test_costs_in_the_trillions_are_exact():
    costs, errors = medium("unrelated", seed=5)
    budget, scale = 700, 10**12
    small = solve_knapsack(costs, errors, budget)
    huge = solve_knapsack(costs * scale + 1, errors, budget * scale + len(costs))
    assert huge.total_error == pytest.approx(small.total_error, rel=1e-12)
    assert huge.total_cost == small.total_cost * scale + len(costs)
    # With one parameter less in total, that choice no longer fits.
    tight = solve_knapsack(costs * scale + 1, errors, huge.total_cost - 1)
    assert tight.total_error > small.total_error


@pytest.mark.parametrize("kind", ["profiles", "fixed charge"])
def test_an_exhausted_search_returns_a_valid_bound_without_proof(monkeypatch, kind):
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


def test_a_search_stores_a_bounded_number_of_labels(monkeypatch):
    frontiers = []

    class Recorded(label_search._Frontier):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            frontiers.append(self)

    def remembered():
        stored = [sum(len(origin) for _, origin, _ in frontier._history) for frontier in frontiers]
        return max(front + back for front, back in zip(stored[::2], stored[1::2], strict=True))

    monkeypatch.setattr(label_search, "_Frontier", Recorded)
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
    monkeypatch.setattr(label_search, "_MAX_LABELS", limit)
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
def test_corner_cases_are_solved(costs, errors, budget, choices):
    solution = solve_knapsack(np.array(costs), np.array(errors), budget)
    assert (solution and solution.choices.tolist()) == choices


def test_inputs_are_not_modified():
    costs, errors = medium("profiles", seed=0)
    before = costs.copy(), errors.copy()
    solve_knapsack(costs, errors, int(costs.mean(axis=1).sum()))
    smallest_cap(costs, errors, int(costs.mean(axis=1).sum()))
    np.testing.assert_array_equal(costs, before[0])
    np.testing.assert_array_equal(errors, before[1])
