"""The multiple-choice knapsack by exhaustive search, and by plain dynamic programming over every integer budget."""

import itertools

import numpy as np
from hypothesis import strategies as st


def brute_force(costs, errors, budget):
    """Return the least sum of errors over all choices within the budget; None if no choice fits."""
    sums = [
        sum(float(errors[layer, column]) for layer, column in enumerate(choice))
        for choice in itertools.product(range(costs.shape[1]), repeat=costs.shape[0])
        if sum(int(costs[layer, column]) for layer, column in enumerate(choice)) <= budget
    ]
    least = min(sums, default=np.inf)
    return least if np.isfinite(least) else None


def dynamic_programme(costs, errors, budget):
    """Return the same, one layer after the other; memory and time grow with the budget."""
    if budget < 0:
        return None
    least = np.zeros(budget + 1)
    for layer_costs, layer_errors in zip(costs, errors, strict=True):
        extended = np.full(budget + 1, np.inf)
        for cost, error in zip(layer_costs.tolist(), layer_errors.tolist(), strict=True):
            if cost <= budget and np.isfinite(error):
                extended[cost:] = np.minimum(extended[cost:], least[: budget + 1 - cost] + error)
        least = extended
    return float(least[-1]) if np.isfinite(least[-1]) else None


def cap_is_feasible(costs, errors, budget, cap):
    """Return whether the cheapest candidates with an error of at most the cap fit the budget."""
    total = 0
    for layer_costs, layer_errors in zip(costs, errors, strict=True):
        allowed = [int(cost) for cost, error in zip(layer_costs, layer_errors, strict=True) if error <= cap < np.inf]
        if not allowed:
            return False
        total += min(allowed)
    return total <= budget


def smallest_cap(costs, errors, budget):
    """Return the smallest feasible of all relevant caps."""
    return min(
        (cap for cap in set(errors.ravel().tolist()) if cap_is_feasible(costs, errors, budget, cap)), default=None
    )


@st.composite
def instances(draw):
    """Return a few layers, with the cost structures of real profiles and difficult ones."""
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
