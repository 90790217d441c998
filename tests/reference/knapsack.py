"""The multiple-choice knapsack by trying everything, and by the plain dynamic programme over every whole budget."""

import itertools

import numpy as np


def brute_force(costs, errors, budget):
    """Least sum of errors over all choices within the budget; None if there is none."""
    sums = [
        sum(float(errors[layer, column]) for layer, column in enumerate(choice))
        for choice in itertools.product(range(costs.shape[1]), repeat=costs.shape[0])
        if sum(int(costs[layer, column]) for layer, column in enumerate(choice)) <= budget
    ]
    least = min(sums, default=np.inf)
    return least if np.isfinite(least) else None


def dynamic_programme(costs, errors, budget):
    """The same, one layer after the other; memory and time grow with the budget."""
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
    """Whether the cheapest candidates with an error of at most the cap fit the budget."""
    total = 0
    for layer_costs, layer_errors in zip(costs, errors, strict=True):
        allowed = [int(cost) for cost, error in zip(layer_costs, layer_errors, strict=True) if error <= cap < np.inf]
        if not allowed:
            return False
        total += min(allowed)
    return total <= budget


def smallest_cap(costs, errors, budget):
    """The smallest feasible of all caps that could matter."""
    return min(
        (cap for cap in set(errors.ravel().tolist()) if cap_is_feasible(costs, errors, budget, cap)), default=None
    )
