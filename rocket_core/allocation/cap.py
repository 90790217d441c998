"""The paper's cap on the error of each layer: the smallest at which any allocation fits, and its reference error."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from rocket_core.sizes.budget import parameter_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """The largest error that a layer may have.

    Attributes:
        error: the cap.
        smallest: the smallest cap at which any choice fits.
        reference: mean error of uniform compression, by which alpha is measured.
    """

    error: float
    smallest: float
    reference: float

    def alpha(self, error: float) -> float:
        """Return an error divided by the reference; 0 if the reference is 0."""
        return error / self.reference if self.reference else 0.0


def error_cap(
    costs: Int64[np.ndarray, "layers candidates"],
    errors: Float64[np.ndarray, "layers candidates"],
    ratio: float,
    budget: int,
    slack: float,
) -> Cap:
    """Return the cap for a ratio; see `Allocator`.

    Args:
        costs: as for `smallest_cap`.
        errors: as for `smallest_cap`.
        ratio: fraction to remove, [0, 1).
        budget: upper bound of the sum of costs.
        slack: relative slack on the smallest cap, >= 0.
    """
    smallest = smallest_cap(costs, errors, budget)
    reference = _uniform_error(costs, errors, ratio)
    return Cap(error=smallest * (1 + slack), smallest=smallest, reference=reference)


def smallest_cap(
    costs: Int64[np.ndarray, "layers candidates"], errors: Float64[np.ndarray, "layers candidates"], budget: int
) -> float:
    """Return the smallest t at which the cheapest candidates with error <= t, one for each layer, fit the budget.

    The result is exact: t is one of the errors, and no choice fits with a cap below t.

    Args:
        costs: >= 0.
        errors: >= 0; infinite for a candidate that is absent.
        budget: upper bound of the sum of costs.

    Returns:
        t; infinite if no choice fits the budget whatever its errors.
    """
    order = np.argsort(errors, axis=1, kind="stable")
    errors = np.take_along_axis(errors, order, axis=1)
    costs = np.take_along_axis(costs, order, axis=1)
    # The cheapest cost up to each error; an absent candidate sorts last and lowers no cost.
    cheapest = np.minimum.accumulate(np.where(np.isfinite(errors), costs, np.iinfo(np.int64).max), axis=1)
    every_layer_has_one = float(errors[:, 0].max())
    if math.isinf(every_layer_has_one):
        return math.inf
    savings = (cheapest[:, :-1] - cheapest[:, 1:]).ravel()
    thresholds = errors[:, 1:].ravel()
    excess = int(cheapest[:, 0].sum()) - budget
    if excess <= 0:
        return every_layer_has_one
    order = np.argsort(thresholds, kind="stable")
    saved = np.cumsum(savings[order])
    enough = int(np.searchsorted(saved, excess))
    if enough == len(saved):
        return math.inf
    return max(every_layer_has_one, float(thresholds[order[enough]]))


def _uniform_error(
    costs: Int64[np.ndarray, "layers candidates"],
    errors: Float64[np.ndarray, "layers candidates"],
    ratio: float,
) -> float:
    """Return the mean error of the layers when each is compressed by itself at the ratio, as `Allocator` describes."""
    present = np.isfinite(errors)
    # Layers of a model have few sizes, and exact decimal arithmetic is slow.
    sizes = costs[:, 0].tolist()
    budgets = {size: parameter_budget(size, ratio) for size in set(sizes)}
    within = present & (costs <= np.array([[budgets[size]] for size in sizes]))
    largest = np.where(within, costs, -1).max(axis=1)
    smallest = np.where(present, costs, np.iinfo(np.int64).max).min(axis=1)
    uniform = np.where(largest < 0, smallest, largest)
    return float(np.where(present & (costs == uniform[:, None]), errors, np.inf).min(axis=1).mean())
