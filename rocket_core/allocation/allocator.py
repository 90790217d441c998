"""Choice of one candidate per layer from layer profiles and a target ratio."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from pydantic import Field

from rocket_core.allocation.cap import error_cap
from rocket_core.allocation.items import Item, build_items, chosen_candidate, price
from rocket_core.allocation.knapsack import solve_knapsack
from rocket_core.allocation.label_search import undominated
from rocket_core.allocation.spending import spend
from rocket_core.candidates import Candidate, FormatGroup, FrontierPoint, LayerProfile, SharedCandidate, SizePoint
from rocket_core.config import Objective
from rocket_core.errors import InvalidConfigError
from rocket_core.schema import FrozenModel
from rocket_core.sizes.budget import BudgetUnit, parameter_budget
from rocket_core.sizes.reachability import RATIO_STEPS, Reach
from rocket_core.sizes.target import ByRatio

_Count = Annotated[int, Field(ge=0)]
_Error = Annotated[float, Field(ge=0)]


class Allocation(FrozenModel):
    """One candidate for every layer."""

    objective: Objective
    """what was summed over layers."""
    ratio: Annotated[float, Field(ge=0, lt=1)]
    """target compression ratio."""
    budget_unit: BudgetUnit
    """what the budget counts."""
    budget: _Count
    """kept parameters, or stored bytes, allowed."""
    compressible: _Count
    """parameters, or bytes, of all layers when dense."""
    kept: _Count
    """cost of the chosen candidates and the extra nonzeros, at most the budget."""
    choices: tuple[_Count, ...]
    """index of each layer's chosen candidate, in the order of the profiles: the layer's own candidates are numbered
    first, then the shared ones of its group.
    """
    extra_nonzeros: tuple[_Count, ...]
    """nonzeros added to each layer's candidate to use up the budget."""
    reference_error: _Error | None
    """mean error of all layers compressed uniformly at the target ratio; None if the objective has no cap."""
    smallest_alpha: _Error | None
    """the smallest alpha at which any allocation fits; 0 if the reference error is 0, as at ratio 0; None if the
    objective has no cap.
    """
    alpha: _Error | None
    """error cap divided by `reference_error`; 0 and None as for `smallest_alpha`."""
    total_error: _Error
    """sum of the objective over the layers."""
    lower_bound: _Error
    """no allocation under the same budget and cap has a smaller `total_error`."""
    proven: bool
    """whether `total_error` is proven to be minimal; `lower_bound` then equals it."""


class Allocator:
    """Allocator for one set of profiles at any number of ratios; work that does not depend on the ratio is done once.

    min Σ_l error(l, x_l) subject to Σ_l cost(l, x_l) <= floor((1 - ratio) · Σ_l cost(l, dense)), where the cost is
    kept parameters or stored bytes and

    - `weight`: error is `weight_error`, and each layer's is at most alpha · reference error. The smallest alpha at
      which any choice fits is found exactly; alpha is that times `1 + cap_slack`. The reference error is the mean over
      the layers of the `weight_error` that each has when compressed uniformly: that of its largest candidate within
      `(1 - ratio)` of its dense cost, or of its smallest candidate if none is small enough.
    - `whitened`: error is `reconstruction_error` squared, without a cap.
    - `fisher`: error is `loss`, without a cap.

    Input groups whose profile has shared candidates are decided for all their layers together. Except for `weight`, the
    rest of the budget is spent on single nonzeros of layers that are sparse anyway.

    Takes milliseconds for a few hundred layers, so many ratios can be tried.

    Args:
        profiles: the layers, at least one.
        objective: `weight`, `whitened` or `fisher`.
        cap_slack: relative slack on the smallest cap, >= 0; only used with `weight`.
        budget_unit: what the budget counts.
        itemsize: bytes of one more nonzero, used if the budget counts bytes.
        format_groups: layers that must be stored in the same way; these have no shared candidates.

    Attributes:
        reach: how small the layers can become.

    Raises:
        InvalidConfigError: the slack is out of range, the profiles are empty, or they lack the objective's error.

    References:
        ROCKET, "Constrained Multi-Choice Knapsack Formulation".
    """

    def __init__(
        self,
        profiles: Sequence[LayerProfile],
        *,
        objective: Objective,
        cap_slack: float,
        budget_unit: BudgetUnit = "parameters",
        itemsize: int = 1,
        format_groups: Iterable[FormatGroup] = (),
    ) -> None:
        if not profiles:
            raise InvalidConfigError("there is no layer to compress; ignore fewer")
        if not 0 <= cap_slack < math.inf:
            raise InvalidConfigError(
                f"cap slack {cap_slack} is out of range; give a number of at least 0, such as 0.01"
            )
        assert objective != "weight" or not any(profile.shared for profile in profiles), "a cap is one of single layers"
        self._profiles = profiles
        self._objective: Objective = objective
        self._cap_slack = cap_slack
        self._budget_unit: BudgetUnit = budget_unit
        self._itemsize = itemsize
        self._priced = price(profiles, budget_unit, objective)
        self._items = build_items(profiles, self._priced, format_groups)
        self._costs = _padded((item.costs.tolist() for item in self._items), 0)
        self._errors = _padded((item.errors.tolist() for item in self._items), math.inf)
        smallest = sum(int(item.costs.min()) for item in self._items)
        self.reach = Reach(
            unit=budget_unit,
            dense=sum(int(layer.costs[0]) for layer in self._priced),
            smallest=smallest,
            certain=smallest,
            parameters=sum(profile.parameters for profile in profiles),
        )

    @property
    def reachable_ratio(self) -> float:
        """Largest ratio that can be reached, rounded down to 4 decimals; [0, 1)."""
        return self.reach.ratio

    def allocate(self, ratio: float) -> Allocation:
        """Choose one candidate per layer with the least total error within the budget of a ratio.

        Args:
            ratio: fraction of all parameters, or bytes, to remove, [0, 1).

        Raises:
            InvalidConfigError: the ratio is out of range.
            InfeasibleBudgetError: even the smallest candidates exceed the budget; names the nearest reachable ratio.
        """
        if not 0 <= ratio < 1:
            raise InvalidConfigError(
                f"compression ratio {ratio} is out of range; give a number from 0 up to, but not 1"
            )
        self.reach.check(ByRatio(ratio=ratio))
        budget = parameter_budget(self.reach.dense, ratio)
        errors = self._errors
        cap = None
        if self._objective == "weight":
            cap = error_cap(self._costs, errors, ratio, budget, self._cap_slack)
            errors = np.where(errors > cap.error, math.inf, errors)
        solution = solve_knapsack(self._costs, errors, budget)
        assert solution is not None, "the smallest candidates fit, and so does some choice under the smallest cap"
        choices = _choices(self._items, solution.choices.tolist(), len(self._profiles))
        per_nonzero = self._itemsize if self._budget_unit == "bytes" else 1
        # The paper's objective is kept to the letter.
        left = 0 if self._objective == "weight" else budget - solution.total_cost
        extra = spend(self._profiles, choices, self._priced, left, per_nonzero)
        return Allocation(
            objective=self._objective,
            ratio=ratio,
            budget_unit=self._budget_unit,
            budget=budget,
            compressible=self.reach.dense,
            kept=solution.total_cost + sum(extra) * per_nonzero,
            choices=choices,
            extra_nonzeros=extra,
            reference_error=None if cap is None else cap.reference,
            smallest_alpha=None if cap is None else cap.alpha(cap.smallest),
            alpha=None if cap is None else cap.alpha(cap.error),
            total_error=solution.total_error,
            lower_bound=solution.lower_bound,
            proven=solution.proven,
        )

    def within_error(self, most: float) -> Allocation:
        """Return the allocation at the largest ratio, in steps of 1e-4, whose total error is at most a bound.

        Args:
            most: the bound, >= 0, in the unit of the objective.

        Raises:
            InvalidConfigError: the bound is negative or not a number.
        """
        if not 0 <= most < math.inf:
            raise InvalidConfigError(f"error bound {most} is out of range; give a number of at least 0")
        # Fewer parameters never have less error, so bisection finds it: at most 14 allocations.
        reached, beyond = 0, round(self.reachable_ratio * RATIO_STEPS) + 1
        best = self.allocate(0.0)
        while beyond - reached > 1:
            middle = (reached + beyond) // 2
            found = self.allocate(middle / RATIO_STEPS)
            if found.total_error <= most:
                reached, best = middle, found
            else:
                beyond = middle
        return best

    def frontier(self, ratios: Iterable[float]) -> tuple[SizePoint, ...]:
        """Return the predicted model at each of the given ratios; unreachable ratios are left out.

        Args:
            ratios: fractions to remove, [0, 1).
        """
        within = (ratio for ratio in ratios if ratio <= self.reachable_ratio)
        return tuple(self._point(self.allocate(ratio)) for ratio in within)

    def _point(self, allocation: Allocation) -> SizePoint:
        selected = [candidate for _, candidate in chosen(self._profiles, allocation, itemsize=self._itemsize)]
        return SizePoint(
            ratio=allocation.ratio,
            kept_parameters=sum(candidate.kept_parameters for candidate in selected),
            stored_bytes=sum(candidate.stored_bytes for candidate in selected),
            error=allocation.total_error,
        )


def chosen(
    profiles: Sequence[LayerProfile], allocation: Allocation, *, itemsize: int
) -> list[tuple[LayerProfile, Candidate]]:
    """Return each layer with the candidate that an allocation chose for it, extra nonzeros included.

    Args:
        profiles: the profiles that the allocation was made from.
        allocation: the allocation.
        itemsize: bytes of a nonzero.
    """
    candidates = chosen_candidate(profiles, allocation.choices)
    return [
        (profile, _enlarged(candidate, extra, itemsize))
        for (profile, candidate), extra in zip(candidates, allocation.extra_nonzeros, strict=True)
    ]


def layer_frontiers(
    profiles: Sequence[LayerProfile], objective: Objective, budget_unit: BudgetUnit
) -> dict[str, tuple[FrontierPoint, ...]]:
    """Return the candidates worth choosing for each layer by itself, and for each group at its first layer.

    Args:
        profiles: all layers.
        objective: which errors to return.
        budget_unit: what costs count.

    Returns:
        By layer name: the layer's own candidates that no other one beats in both size and error, by falling cost, then
        the same of the shared ones.
    """
    frontiers = {}
    for profile, layer in zip(profiles, price(profiles, budget_unit, objective), strict=True):
        own = len(profile.candidates)
        frontiers[profile.name] = (
            *_frontier(profile.candidates, layer.costs[:own], layer.errors[:own]),
            *_frontier(profile.shared, layer.costs[own:], layer.errors[own:]),
        )
    return frontiers


def _enlarged(candidate: Candidate, extra: int, itemsize: int) -> Candidate:
    if extra == 0:
        return candidate
    assert candidate.nnz is not None
    larger = {
        "nnz": candidate.nnz + extra,
        "kept_parameters": candidate.kept_parameters + extra,
        "stored_bytes": candidate.stored_bytes + extra * itemsize,
    }
    return candidate.model_copy(update=larger)


def _frontier(
    candidates: Sequence[Candidate] | Sequence[SharedCandidate],
    costs: Int64[np.ndarray, " candidates"],
    errors: Float64[np.ndarray, " candidates"],
) -> list[FrontierPoint]:
    return [
        FrontierPoint(
            kind=candidates[index].kind,
            shared=isinstance(candidates[index], SharedCandidate),
            cost=int(costs[index]),
            error=float(errors[index]),
        )
        for index in undominated(costs, errors).tolist()[::-1]
    ]


def _choices(items: Sequence[Item], options: Sequence[int], layers: int) -> tuple[int, ...]:
    choices = [0] * layers
    for item, option in zip(items, options, strict=True):
        for layer, choice in zip(item.layers, item.choices[option].tolist(), strict=True):
            choices[layer] = choice
    return tuple(choices)


def _padded(rows: Iterable[Sequence[float]], absent: int | float) -> Shaped[np.ndarray, "layers candidates"]:
    """Return a table of integers if `absent` is an integer, otherwise of floats."""
    rows = list(rows)
    table = np.full((len(rows), max(map(len, rows))), absent)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
