"""Exact search over the undecided layers: labels, dominance, and a bound from the linear relaxation.

A label is a choice for some of the layers, represented by its exact integer cost and its error. Among labels over the
same layers, one that has neither a lower cost nor a lower error than another is dominated. A label is also useless if
its error, plus the least error that a linear relaxation of the other layers allows within the remaining budget, is not
below an error already attained. The labels that survive form a frontier.

Two frontiers grow towards each other, one from the layers that change their candidate most cheaply, one from those
that do so least cheaply, and are joined by one sorted search, so the size of each is about the square root of what a
single one would become (Horowitz and Sahni, "Computing partitions with applications to the knapsack problem", 1974).
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64

from rocket_core.allocation.relaxation import HullSteps, hull_steps

# Labels stored in one search, 4 bytes each; a search that would need more continues with smaller frontiers.
_MAX_LABELS = 2**25
# Labels times candidates of one layer: bounds the memory of one step, about 100 bytes each.
_MAX_PRODUCTS = 2**21
# Number of extended labels above which filtering useless ones before sorting pays off.
_SORT_ALL = 4096
# Number of steps from which cumulated sums are corrected instead of recomputed, and how often they are recomputed
# nevertheless, so that rounding errors do not accumulate.
_LONG_SUM = 2000
_SUM_ANEW = 256
# Labels that the frontier of the cheaply changed layers may have before the other frontier starts to grow.
_FIRST_FRONTIER = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """Undecided layers; candidates in flat arrays, cost and error relative to each layer's base candidate.

    Attributes:
        layer: position of the layer, from 0, ascending; layers that leave their base candidate most cheaply first.
        option: column of the candidate in the caller's table.
        cost: ascending within a layer.
        error: strictly falling within a layer.
        capacity: cost that all layers together may add to that of their base candidates; may be negative.
    """

    layer: Int64[np.ndarray, " candidates"]
    option: Int64[np.ndarray, " candidates"]
    cost: Int64[np.ndarray, " candidates"]
    error: Float64[np.ndarray, " candidates"]
    capacity: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        options: column chosen for each layer of the core; None if nothing is better than the cutoff.
        open_bound: no choice that the search skipped has an error below this; infinite if it skipped none.
    """

    options: Int64[np.ndarray, " layers"] | None
    open_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Multiples:
    """Costs rounded to whole multiples of a unit, above the true costs by at most an excess.

    Attributes:
        unit: cost of one multiple; 1 if the costs have no common unit, not even approximately.
        multiple: multiples of each candidate.
        excess: for each layer, the largest amount by which `unit * multiple` is above the cost.
    """

    unit: float
    multiple: Int64[np.ndarray, " candidates"]
    excess: Float64[np.ndarray, " layers"]


def _common_unit(cost: Int64[np.ndarray, " candidates"], starts: Int64[np.ndarray, " layers"]) -> _Multiples:
    """Find a unit of which all costs are approximate multiples.

    Layers profiled at equal steps of the compression ratio have such a unit, up to the rounding of each budget to
    whole parameters. The linear relaxation may then round the budget down to a multiple: if it falls between two,
    this closes most of the gap between relaxation and optimum. A heuristic: the smallest cost is assumed to be 1 to 8
    units, and a unit found this way is verified.
    """
    sizes = np.unique(np.abs(cost))
    sizes = sizes[sizes > 0].astype(np.float64)
    # Beyond 2^50, sums of costs are not exact in floating point.
    most_parts = 8 if np.abs(cost).sum(dtype=np.float64) < 2**50 else 0
    for parts in range(1, most_parts + 1):
        unit = float(sizes[0]) / parts
        if unit < len(starts):
            break
        for _ in range(2):
            multiples = np.rint(sizes / unit)
            unit = float(sizes @ multiples / (multiples @ multiples))
        multiple = np.rint(cost / unit)
        excess = np.maximum.reduceat(multiple * unit - cost, starts)
        if excess.sum() < unit / 4:
            return _Multiples(unit=unit, multiple=multiple.astype(np.int64), excess=excess)
    return _Multiples(unit=1.0, multiple=cost, excess=np.zeros(len(starts)))


class _Completion:
    """Least error of the layers that a frontier has not decided, by linear relaxation, for any remaining room."""

    def __init__(self, core: Core, steps: HullSteps, multiples: _Multiples) -> None:
        self._error = core.error
        self._unit = multiples.unit
        self._multiple = multiples.multiple
        self._excess = multiples.excess
        self._excess_left = float(multiples.excess.sum())
        self._first_cost = multiples.multiple[steps.first]
        self._first_cost_left = int(self._first_cost.sum())
        self._first_error = core.error[steps.first]
        self._first_error_left = float(self._first_error.sum())
        self._by_layer = steps.layer.argsort(kind="stable") + 1
        self._starts = np.searchsorted(steps.layer[self._by_layer - 1], np.arange(len(steps.first) + 1)).tolist()
        # A decided layer's steps stay where they are, with length 0.
        self._costs = np.concatenate(([0], steps.cost))
        self._gains = np.concatenate(([0.0], steps.gain))
        self._slopes = np.concatenate((steps.gain / steps.cost, [0.0]))
        self._reached, self._saved = self._costs.cumsum(), self._gains.cumsum()
        self._decided = 0

    def decide(self, layer: int) -> None:
        """Mark a layer as decided."""
        steps = self._by_layer[self._starts[layer] : self._starts[layer + 1]]
        self._decided += 1
        summed_anew = len(self._costs) < _LONG_SUM or self._decided % _SUM_ANEW == 0
        if not summed_anew:
            for step in steps.tolist():
                self._reached[step:] -= self._costs[step]
                self._saved[step:] -= self._gains[step]
        self._costs[steps] = 0
        self._gains[steps] = 0.0
        if summed_anew:
            self._reached, self._saved = self._costs.cumsum(), self._gains.cumsum()
        self._excess_left -= float(self._excess[layer])
        self._first_cost_left -= int(self._first_cost[layer])
        self._first_error_left -= float(self._first_error[layer])

    def relax(
        self, room: Int64[np.ndarray, " labels"]
    ) -> tuple[Float64[np.ndarray, " labels"], Float64[np.ndarray, " labels"]]:
        """Return the least error of the undecided layers within each room, infinite if none fits, and its slope there.

        The slope is the error that one more multiple of room would save.
        """
        if self._unit != 1:
            # The 1 is far above the rounding errors of this line and of the excesses, and far below the unit.
            room = np.floor((room + (self._excess_left + 1)) / self._unit).astype(np.int64)
        room = room - self._first_cost_left
        step = self._reached.searchsorted(room, side="right") - 1
        slope = self._slopes[step]
        error = self._first_error_left - self._saved[step] - slope * (room - self._reached[step])
        error[step < 0] = np.inf
        return error, slope

    def affords(
        self, candidates: slice, slope: Float64[np.ndarray, " labels"], allowance: Float64[np.ndarray, " labels"]
    ) -> Bool[np.ndarray, "candidates labels"]:
        """Return whether choosing a candidate of an undecided layer may raise the bound by less than the allowance.

        It raises the bound by at least its reduced cost at the slope of the relaxation.
        """
        price = self._error[candidates, None] + self._multiple[candidates, None] * slope
        affordable: Bool[np.ndarray, "candidates labels"] = price < price.min(axis=0) + allowance
        return affordable


class _Frontier:
    """Undominated labels over the layers added so far, by rising cost and falling error."""

    def __init__(self, core: Core, starts: list[int], completion: _Completion) -> None:
        self.cost = np.zeros(1, dtype=np.int64)
        self.error = np.zeros(1)
        self.open_bound = np.inf
        # Each label's bound by the linear relaxation, and the slope there.
        self._bound = np.full(1, -np.inf)
        self._slope = np.zeros(1)
        self._core = core
        self._starts = starts
        self._completion = completion
        self._history: list[tuple[int, Int64[np.ndarray, " labels"], int]] = []

    def add(self, layer: int, cutoff: float, width: int) -> None:
        """Extend every label by every candidate of a layer and keep those that may lead below the cutoff."""
        core = self._core
        candidates = slice(self._starts[layer], self._starts[layer + 1])
        self._thin(min(width, _MAX_PRODUCTS // (candidates.stop - candidates.start)))
        costs, errors, before = core.cost[candidates], core.error[candidates], len(self.cost)
        cost, error = (self.cost + costs[:, None]).ravel(), (self.error + errors[:, None]).ravel()
        if len(cost) <= _SORT_ALL:
            origin = np.arange(len(cost))
        else:
            affordable = self._completion.affords(candidates, self._slope, cutoff - self._bound)
            origin = affordable.ravel().nonzero()[0]
            cost, error = cost[origin], error[origin]
        kept = undominated(cost, error)
        self.cost, self.error = cost[kept], error[kept]
        self._completion.decide(layer)
        completed, self._slope = self._completion.relax(core.capacity - self.cost)
        self._bound = self.error + completed
        self._history.append((layer, origin[kept].astype(np.int32), before))
        self._keep((self._bound < cutoff).nonzero()[0])

    def _keep(self, labels: Int64[np.ndarray, " kept"]) -> None:
        """Drop all other labels."""
        self.cost, self.error = self.cost[labels], self.error[labels]
        self._bound, self._slope = self._bound[labels], self._slope[labels]
        layer, origin, before = self._history[-1]
        self._history[-1] = (layer, origin[labels], before)

    def _thin(self, width: int) -> None:
        """Keep the most promising label of each of `width` equal ranges of cost, and record the bound of the rest.

        A heuristic: the most promising labels overall would be many of nearly the same cost, which would all miss the
        budget by the same amount.
        """
        if len(self.cost) <= width:
            return
        share = width / float(self.cost[-1] - self.cost[0] + 1)
        bucket = ((self.cost - self.cost[0]) * share).astype(np.int64)
        starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
        least = np.minimum.reduceat(self._bound, starts)
        keep = np.flatnonzero(self._bound == np.repeat(least, np.diff(np.append(starts, len(bucket)))))
        keep = keep[np.append(True, bucket[keep[1:]] != bucket[keep[:-1]])]
        self.open_bound = min(self.open_bound, float(np.delete(self._bound, keep).min(initial=np.inf)))
        self._keep(keep)

    def cheapest_error(self, room: int) -> tuple[float, int]:
        """Return the least error of the labels that fit into the room, infinite if none does, and its index."""
        # Labels rise in cost and fall in error, so it is the most expensive one that fits.
        label = int(self.cost.searchsorted(room, side="right")) - 1
        return (float(self.error[label]), label) if label >= 0 else (np.inf, label)

    def trace(self, label: int, options: Int64[np.ndarray, " layers"]) -> None:
        """Write the columns that a label represents into `options`."""
        for layer, origin, before in reversed(self._history):
            candidate, label = divmod(int(origin[label]), before)
            options[layer] = self._core.option[self._starts[layer] + candidate]


def undominated(
    cost: Int64[np.ndarray, " labels"], error: Float64[np.ndarray, " labels"]
) -> Int64[np.ndarray, " kept"]:
    """Return the labels that no other label matches in both cost and error, by rising cost."""
    order = cost.argsort(kind="stable")
    least = np.minimum.accumulate(error[order])
    order = order[np.concatenate(([True], least[1:] < least[:-1]))[: len(order)]]
    # Among labels of equal cost keep only the last, which has the least error.
    dearer = cost[order]
    return order[np.concatenate((dearer[1:] != dearer[:-1], [True]))[: len(order)]]


def search(core: Core, cutoff: float, *, tolerance: float, width: int) -> SearchResult:
    """Find the choice of least error below a cutoff, if one exists.

    Exact, up to the tolerance, if `open_bound` of the result is not below the error found (or the cutoff, if nothing
    was found): labels are skipped only beyond `width` or beyond the memory that a search may use.

    Args:
        core: at least one layer; its base candidates have cost 0.
        cutoff: error, relative to the base candidates, that a choice must be below.
        tolerance: errors closer than this count as equal, >= 0.
        width: labels per frontier, >= 1.
    """
    divisor = int(np.gcd.reduce(core.cost))
    core = replace(core, cost=core.cost // divisor, capacity=core.capacity // divisor)
    layers = int(core.layer[-1]) + 1
    starts = np.searchsorted(core.layer, np.arange(layers))
    multiples = _common_unit(core.cost, starts)
    steps = hull_steps(core.layer, multiples.multiple, core.error)
    bounds = [*starts.tolist(), len(core.layer)]
    front = _Frontier(core, bounds, _Completion(core, steps, multiples))
    back = _Frontier(core, bounds, _Completion(core, steps, multiples))
    base = core.option[core.cost == 0]
    options = None
    low, high, labels_left = 0, layers, _MAX_LABELS
    while low < high and len(front.cost) and len(back.cost):
        allowed = min(width, max(labels_left // 32, _MAX_LABELS // layers, 1))
        if len(front.cost) <= max(_FIRST_FRONTIER, len(back.cost)):
            front.add(low, cutoff, allowed)
            low += 1
            labels_left -= len(front.cost)
            # Combined with the base candidates of all other layers, a label is a choice.
            error, label = front.cheapest_error(core.capacity)
            if error < cutoff:
                cutoff = error - tolerance
                options = base.copy()
                front.trace(label, options)
        else:
            high -= 1
            back.add(high, cutoff, allowed)
            labels_left -= len(back.cost)
    joined = _join(front, back, core.capacity, cutoff)
    if joined is not None:
        options = base.copy()
        front.trace(joined[0], options)
        back.trace(joined[1], options)
    return SearchResult(options=options, open_bound=min(front.open_bound, back.open_bound))


def _join(front: _Frontier, back: _Frontier, capacity: int, cutoff: float) -> tuple[int, int] | None:
    """Pair each label in front with the most expensive one in back that still fits, and return the best pair."""
    if not len(front.cost) or not len(back.cost):
        return None
    partner = np.searchsorted(back.cost, capacity - front.cost, side="right") - 1
    error = np.where(partner < 0, np.inf, front.error + back.error[partner])
    label = int(error.argmin())
    return (label, int(partner[label])) if error[label] < cutoff else None
