"""Multiple-choice knapsack: one candidate per layer, a budget on the sum of costs, the least sum of errors."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from rocket_core.allocation.label_search import Core, search
from rocket_core.allocation.relaxation import hull_steps, relax

# Sums of errors that differ by less than this, relatively, count as equal: the difference is rounding.
_TOLERANCE = 1e-12
_FIRST_LAYERS = 24
_FIRST_WIDTH = 1000
_MAX_WIDTH = 2**18


@dataclass(frozen=True, kw_only=True, slots=True)
class KnapsackSolution:
    """A choice of candidates that fits the budget.

    Attributes:
        choices: chosen column of each layer.
        total_cost: exact sum of the chosen costs, at most the budget.
        total_error: sum of the chosen errors.
        lower_bound: no choice within the budget has a smaller sum of errors, up to a relative 1e-12 of rounding.
            Equal to `total_error` if that is proven to be minimal.
        proven: whether `total_error` is proven to be minimal.
    """

    choices: Int64[np.ndarray, " layers"]
    total_cost: int
    total_error: float
    lower_bound: float
    proven: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """Candidates by rising cost within each layer; dominated and absent ones have an infinite error."""

    costs: Int64[np.ndarray, "layers candidates"]
    errors: Float64[np.ndarray, "layers candidates"]
    columns: Int64[np.ndarray, "layers candidates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Priced:
    """The table priced by the linear relaxation: the cost of deviating from each layer's base candidate.

    With multiplier m, the base is the candidate with the least `error + m * cost`, and the reduced cost of another one
    is by how much its `error + m * cost` is larger. The bound is the sum of the base errors minus m times the budget
    that the bases leave; a choice's error is at least the bound plus the sum of its reduced costs.
    """

    base: Int64[np.ndarray, " layers"]
    base_errors: Float64[np.ndarray, " layers"]
    extra_costs: Int64[np.ndarray, "layers candidates"]
    reduced_costs: Float64[np.ndarray, "layers candidates"]
    capacity: int
    bound: float


def solve_knapsack(
    costs: Int64[np.ndarray, "layers candidates"],
    errors: Float64[np.ndarray, "layers candidates"],
    budget: int,
) -> KnapsackSolution | None:
    """Choose one candidate per layer with the least sum of errors within a budget.

    min Σ errors[l, x_l] subject to Σ costs[l, x_l] <= budget, in exact integer costs, without discretisation. The
    linear relaxation gives a bound and a first choice; candidates whose reduced cost exceeds the gap between the two
    cannot improve on it and are dropped. `label_search.search` searches the rest: first the few layers that change
    most cheaply, which finds good choices and so shrinks the gap, and finally all that remain, which is the proof.

    Takes milliseconds for hundreds of layers, and at most seconds for tens of thousands whose costs and errors are
    unrelated or are multiples of a common unit. The problem is NP-hard: where errors are an affine function of costs
    that differ in every layer, the search may reach its memory bound (about 500 MB). It then returns the best choice
    found, with `proven` false and a lower bound below its error. An estimate is never reported as optimal.

    Args:
        costs: at least one layer; >= 0, up to 2^62 over all layers together.
        errors: >= 0; infinite for a candidate that is absent or forbidden.
        budget: upper bound of the sum of costs.

    Returns:
        The choice; None if no choice fits the budget.

    References:
        Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995, for the core; the DP of
        ROCKET's "Constrained Multi-Choice Knapsack Formulation" on exact costs in place of discretised ones.
    """
    table = _without_dominated(costs, errors)
    present = np.isfinite(table.errors)
    if not present[:, :1].all() or int(table.costs[:, 0].sum()) > budget:
        return None
    rows = np.arange(len(costs))
    layer, column = np.nonzero(present)
    steps = hull_steps(layer, table.costs[present], table.errors[present])
    relaxation = relax(steps, budget - int(table.costs[:, 0].sum()))
    choices, lower_bound = column[relaxation.floor], math.inf
    if relaxation.multiplier > 0:
        choices, lower_bound = _improve(table, _price(table, choices, relaxation.multiplier, budget), choices)
    total_error = math.fsum(table.errors[rows, choices])
    return KnapsackSolution(
        choices=table.columns[rows, choices],
        total_cost=int(table.costs[rows, choices].sum()),
        total_error=total_error,
        lower_bound=min(lower_bound, total_error),
        proven=lower_bound >= total_error,
    )


def _without_dominated(
    costs: Int64[np.ndarray, "layers candidates"], errors: Float64[np.ndarray, "layers candidates"]
) -> _Table:
    absent_last = np.where(np.isfinite(errors), costs, np.iinfo(np.int64).max)
    columns = np.lexsort((errors, absent_last), axis=1)
    costs = np.take_along_axis(costs, columns, axis=1)
    errors = np.take_along_axis(errors, columns, axis=1)
    least = np.minimum.accumulate(errors, axis=1)
    errors[:, 1:][errors[:, 1:] >= least[:, :-1]] = np.inf
    return _Table(costs=costs, errors=errors, columns=columns)


def _price(table: _Table, choices: Int64[np.ndarray, " layers"], multiplier: float, budget: int) -> _Priced:
    rows = np.arange(len(choices))
    # Relative to a choice near the optimum, so that large costs do not swamp the errors.
    extra = table.costs - table.costs[rows, choices][:, None]
    priced = table.errors + multiplier * extra
    base = priced.argmin(axis=1)
    base_errors = table.errors[rows, base]
    capacity = budget - int(table.costs[rows, base].sum())
    return _Priced(
        base=base,
        base_errors=base_errors,
        extra_costs=table.costs - table.costs[rows, base][:, None],
        reduced_costs=priced - priced[rows, base][:, None],
        capacity=capacity,
        bound=math.fsum(base_errors) - multiplier * capacity,
    )


def _improve(
    table: _Table, priced: _Priced, choices: Int64[np.ndarray, " layers"]
) -> tuple[Int64[np.ndarray, " layers"], float]:
    """Search more and more layers until none is left that could improve the choice.

    Returns:
        The best choice found, and a lower bound, which is its own error if the choice is proven optimal.
    """
    rows = np.arange(len(choices))
    base_error = math.fsum(priced.base_errors)
    count, width, lower_bound = _FIRST_LAYERS, _FIRST_WIDTH, priced.bound
    while True:
        error = math.fsum(table.errors[rows, choices])
        cutoff = error * (1 - _TOLERANCE)
        open_ = priced.reduced_costs < cutoff - priced.bound
        open_[rows, priced.base] = True
        layers, cheapest_change = _open_layers(priced, open_)
        if not len(layers):
            return choices, error
        complete = len(layers) <= 2 * count
        if not complete:
            layers = layers[:count]
            open_ &= priced.reduced_costs <= cheapest_change[count - 1]
        result = search(
            _core(table, priced, layers, open_),
            cutoff - base_error,
            tolerance=error * _TOLERANCE,
            width=width * 8 if complete else width,
        )
        if result.options is not None:
            choices = priced.base.copy()
            choices[layers] = result.options
            error = math.fsum(table.errors[rows, choices])
            cutoff = error * (1 - _TOLERANCE)
        exact = base_error + result.open_bound >= cutoff
        if complete:
            if exact:
                return choices, error
            lower_bound = max(lower_bound, base_error + result.open_bound)
            if width * 8 >= _MAX_WIDTH:
                return choices, lower_bound
        count *= 2
        if not exact:
            width *= 4


def _open_layers(
    priced: _Priced, open_: Bool[np.ndarray, "layers candidates"]
) -> tuple[Int64[np.ndarray, " open"], Float64[np.ndarray, " open"]]:
    """Return layers with several candidates left, and the least reduced cost of leaving the base, sorted by it."""
    layers = np.flatnonzero(open_.sum(axis=1) > 1)
    changes = np.where(open_[layers], priced.reduced_costs[layers], np.inf)
    changes[np.arange(len(layers)), priced.base[layers]] = np.inf
    cheapest = changes.min(axis=1, initial=np.inf)
    order = np.argsort(cheapest, kind="stable")
    return layers[order], cheapest[order]


def _core(
    table: _Table,
    priced: _Priced,
    layers: Int64[np.ndarray, " open"],
    open_: Bool[np.ndarray, "layers candidates"],
) -> Core:
    position, option = np.nonzero(open_[layers])
    row = layers[position]
    return Core(
        layer=position,
        option=option,
        cost=priced.extra_costs[row, option],
        error=table.errors[row, option] - priced.base_errors[row],
        capacity=priced.capacity,
    )
