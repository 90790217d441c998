"""Linear relaxation of the multiple-choice knapsack: lower hulls of cost and error, and one sort by slope.

Candidates come as flat arrays, layer after layer. Only candidates on the lower convex hull of a layer's (cost, error)
points take part in the relaxation; walking along the hulls in the order of falling gain per cost, until the budget is
used up, solves it (Sinha and Zoltners, "The multiple-choice knapsack problem", 1979).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class HullSteps:
    """Moves from one hull candidate to the next more expensive one, sorted by falling gain per cost.

    Attributes:
        first: index of each layer's cheapest hull candidate, layers in order.
        layer: layer that a step belongs to.
        target: index of the candidate that a step leads to.
        cost: extra cost of a step, > 0.
        gain: error that a step saves, > 0.
    """

    first: Int64[np.ndarray, " layers"]
    layer: Int64[np.ndarray, " steps"]
    target: Int64[np.ndarray, " steps"]
    cost: Int64[np.ndarray, " steps"]
    gain: Float64[np.ndarray, " steps"]


def hull_steps(
    layer: Int64[np.ndarray, " candidates"],
    cost: Int64[np.ndarray, " candidates"],
    error: Float64[np.ndarray, " candidates"],
) -> HullSteps:
    """Find the lower hulls of all layers at once.

    Args:
        layer: layer of each candidate, ascending.
        cost: ascending within a layer.
        error: strictly falling within a layer.
    """
    # Among candidates of equal cost the last one has the least error.
    last_of_cost = np.append((layer[1:] != layer[:-1]) | (cost[1:] != cost[:-1]), True)
    hull = np.flatnonzero(last_of_cost)
    while True:
        # A point on or above the line between its neighbours is not on the hull, whether or not the neighbours are.
        widths, drops = np.diff(cost[hull]), -np.diff(error[hull])
        inside = layer[hull[:-2]] == layer[hull[2:]]
        above = inside & (drops[:-1] * widths[1:] <= drops[1:] * widths[:-1])
        if not above.any():
            break
        hull = hull[np.concatenate(([True], ~above, [True]))]
    same = layer[hull[1:]] == layer[hull[:-1]]
    widths, drops, targets = widths[same], drops[same], hull[1:][same]
    order = np.argsort(-drops / widths, kind="stable")
    targets = targets[order]
    return HullSteps(
        first=hull[np.append(True, ~same)],
        layer=layer[targets],
        target=targets,
        cost=widths[order],
        gain=drops[order],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaxation:
    """Solution of the linear relaxation.

    Attributes:
        multiplier: error that one more unit of budget saves, the slope at which the budget runs out; 0 if the budget
            pays for every step.
        floor: index of each layer's candidate when the first step that does not fit, and all after it, are left out; a
            feasible choice, and an optimal one if the multiplier is 0.
    """

    multiplier: float
    floor: Int64[np.ndarray, " layers"]


def relax(steps: HullSteps, room: int) -> Relaxation:
    """Take steps in order as long as they fit.

    Args:
        steps: hull steps of layers numbered from 0.
        room: budget left when every layer has its cheapest candidate, >= 0.
    """
    taken = int(np.searchsorted(np.cumsum(steps.cost), room, side="right"))
    floor = steps.first.copy()
    # A layer's steps come in order, so the furthest target is where it ends up.
    np.maximum.at(floor, steps.layer[:taken], steps.target[:taken])
    multiplier = 0.0 if taken == len(steps.cost) else float(steps.gain[taken] / steps.cost[taken])
    return Relaxation(multiplier=multiplier, floor=floor)
