"""From layer profiles and a target ratio to one candidate per layer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from pydantic import BaseModel, ConfigDict, Field

from rocket_core.allocation.knapsack import solve_knapsack
from rocket_core.budget import parameter_budget
from rocket_core.candidates import LayerProfile
from rocket_core.config import Objective
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError

# The nearest reachable ratio is offered in steps of this fraction, so that it can be typed.
_RATIO_STEPS = 10_000

_Count = Annotated[int, Field(ge=0)]
_Error = Annotated[float, Field(ge=0)]


class Allocation(BaseModel):
    """One candidate for every layer.

    Attributes:
        objective: what was summed over layers.
        ratio: target compression ratio.
        budget: kept parameters allowed.
        compressible_parameters: parameters of all layers.
        kept_parameters: what the chosen candidates keep, at most the budget.
        choices: index of the chosen candidate in each layer's profile, in the order of the profiles.
        reference_error: mean error of all layers compressed uniformly at the target ratio; None where the objective
            has no cap.
        smallest_alpha: the smallest alpha at which any allocation fits; 0 where the reference error is 0, as at ratio
            0; None where the objective has no cap.
        alpha: error cap over `reference_error`; likewise.
        total_error: sum of the objective over the layers.
        lower_bound: no allocation under the same budget and cap has a smaller `total_error`.
        proven: whether `total_error` is proven to be the least; `lower_bound` then equals it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    objective: Objective
    ratio: Annotated[float, Field(ge=0, lt=1)]
    budget: _Count
    compressible_parameters: _Count
    kept_parameters: _Count
    choices: tuple[_Count, ...]
    reference_error: _Error | None
    smallest_alpha: _Error | None
    alpha: _Error | None
    total_error: _Error
    lower_bound: _Error
    proven: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cap:
    """The largest error a layer may have, the smallest it could be, and the error both are measured by."""

    error: float
    smallest: float
    reference: float

    def alpha(self, error: float) -> float:
        return error / self.reference if self.reference else 0.0


def allocate(profiles: Sequence[LayerProfile], ratio: float, *, objective: Objective, cap_slack: float) -> Allocation:
    """Chooses one candidate per layer with the least total error within the budget of a compression ratio.

    min Σ_l error(l, x_l) subject to Σ_l kept_parameters(l, x_l) <= floor((1 - ratio) · Σ_l d_in·d_out), where

    - `weight`: error is `weight_error`, and each layer's is at most alpha · reference error. The smallest alpha at
      which any choice fits is found exactly; alpha is that times `1 + cap_slack`. The reference error is the mean over
      the layers of the `weight_error` that each has when compressed uniformly: that of its candidate with the most
      kept parameters within `(1 - ratio) · d_in·d_out`, or of its smallest candidate where none is that small.
    - `whitened`: error is `reconstruction_error` squared, and there is no cap.

    Milliseconds for a few hundred layers, so any number of ratios can be tried on the same profiles.

    Args:
        profiles: the layers, at least one.
        ratio: fraction of all their parameters to remove, [0, 1).
        objective: `weight` or `whitened`.
        cap_slack: relative slack on the smallest cap, >= 0; without effect on `whitened`.

    Raises:
        InvalidConfigError: ratio or slack is out of range, or there are no layers.
        InfeasibleBudgetError: even the smallest candidates exceed the budget; names the nearest ratio within reach.

    References:
        ROCKET, "Constrained Multi-Choice Knapsack Formulation".
    """
    if not profiles:
        raise InvalidConfigError("there is no layer to compress; ignore fewer")
    _check_settings(ratio, cap_slack)
    budget = _feasible_budget(profiles, ratio)
    costs = _padded(([c.kept_parameters for c in profile.candidates] for profile in profiles), 0)
    cap = None
    if objective == "weight":
        errors = _padded(([c.weight_error for c in profile.candidates] for profile in profiles), math.inf)
        cap = _cap(profiles, costs, errors, ratio, budget, cap_slack)
        errors[errors > cap.error] = math.inf
    else:
        errors = _padded(([c.reconstruction_error**2 for c in profile.candidates] for profile in profiles), math.inf)
    solution = solve_knapsack(costs, errors, budget)
    assert solution is not None, "the smallest candidates fit, and so does some choice under the smallest cap"
    return Allocation(
        objective=objective,
        ratio=ratio,
        budget=budget,
        compressible_parameters=sum(profile.parameters for profile in profiles),
        kept_parameters=solution.total_cost,
        choices=tuple(solution.choices.tolist()),
        reference_error=None if cap is None else cap.reference,
        smallest_alpha=None if cap is None else cap.alpha(cap.smallest),
        alpha=None if cap is None else cap.alpha(cap.error),
        total_error=solution.total_error,
        lower_bound=solution.lower_bound,
        proven=solution.proven,
    )


def reachable_ratio(profiles: Sequence[LayerProfile]) -> float:
    """The largest compression ratio that `allocate` can reach, rounded down to 4 decimals; [0, 1)."""
    parameters = sum(profile.parameters for profile in profiles)
    removable = parameters - _smallest_kept(profiles)
    return max(0, min(removable * _RATIO_STEPS // parameters, _RATIO_STEPS - 1)) / _RATIO_STEPS


def smallest_cap(
    costs: Int64[np.ndarray, "layers candidates"], errors: Float64[np.ndarray, "layers candidates"], budget: int
) -> float:
    """The smallest t such that every layer has a candidate with error <= t, and the cheapest of these fit the budget.

    Exact: t is one of the errors. Without a cap at t, or below, no choice fits.

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
    # The cheapest cost up to each error; an absent candidate comes last and makes nothing cheaper.
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


def _check_settings(ratio: float, cap_slack: float) -> None:
    if not 0 <= ratio < 1:
        raise InvalidConfigError(f"compression ratio {ratio} is out of range; give a number from 0 up to, but not 1")
    if not 0 <= cap_slack < math.inf:
        raise InvalidConfigError(f"cap slack {cap_slack} is out of range; give a number of at least 0, such as 0.01")


def _feasible_budget(profiles: Sequence[LayerProfile], ratio: float) -> int:
    parameters = sum(profile.parameters for profile in profiles)
    budget = parameter_budget(parameters, ratio)
    smallest = _smallest_kept(profiles)
    if smallest > budget:
        nearest = reachable_ratio(profiles)
        raise InfeasibleBudgetError(
            f"compression ratio {ratio} is out of reach: it allows {budget} of the {parameters} compressible "
            f"parameters, and the smallest candidates of the {len(profiles)} layers keep {smallest}. Ask for {nearest} "
            "or less, or ignore fewer layers",
            nearest_ratio=nearest,
        )
    return budget


def _smallest_kept(profiles: Sequence[LayerProfile]) -> int:
    return sum(min(candidate.kept_parameters for candidate in profile.candidates) for profile in profiles)


def _padded(rows: Iterable[Sequence[float]], absent: int | float) -> Shaped[np.ndarray, "layers candidates"]:
    """A table of integers if `absent` is one, else of floats."""
    rows = list(rows)
    table = np.full((len(rows), max(map(len, rows))), absent)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def _cap(
    profiles: Sequence[LayerProfile],
    costs: Int64[np.ndarray, "layers candidates"],
    errors: Float64[np.ndarray, "layers candidates"],
    ratio: float,
    budget: int,
    slack: float,
) -> _Cap:
    smallest = smallest_cap(costs, errors, budget)
    reference = _uniform_error(profiles, costs, errors, ratio)
    return _Cap(error=smallest * (1 + slack), smallest=smallest, reference=reference)


def _uniform_error(
    profiles: Sequence[LayerProfile],
    costs: Int64[np.ndarray, "layers candidates"],
    errors: Float64[np.ndarray, "layers candidates"],
    ratio: float,
) -> float:
    """Mean error of the layers when each is compressed by itself at the ratio, as `allocate` describes."""
    present = np.isfinite(errors)
    # Layers of a model have few sizes, and exact decimal arithmetic is slow.
    budgets = {size: parameter_budget(size, ratio) for size in {profile.parameters for profile in profiles}}
    within = present & (costs <= np.array([[budgets[profile.parameters]] for profile in profiles]))
    largest = np.where(within, costs, -1).max(axis=1)
    smallest = np.where(present, costs, np.iinfo(np.int64).max).min(axis=1)
    uniform = np.where(largest < 0, smallest, largest)
    return float(np.where(present & (costs == uniform[:, None]), errors, np.inf).min(axis=1).mean())
