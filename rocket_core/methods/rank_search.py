"""Search for the best trade-off of rank against nonzeros at each ratio (paper, section 3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rocket_core.config import Objective
from rocket_core.linalg.factorization import Factorization, PreparedLayer, factorize_layer, improve
from rocket_core.sizes import budget

# At a fixed budget the error falls and then rises with the rank, so a coarse and then a fine descent find its minimum;
# from the minimum of the neighbouring ratio a fine one does.
_STRIDES = (2, 1)
# Heuristic bounds: sweeps have not been observed to lower an error by more than a sixth, nor the search to end more
# than a tenth below the least error of a few shapes, which are evenly among all, one less than `_TRIED`.
_SWEEPS_GAIN = 1.25
_SEARCH_GAIN = 1.1
_TRIED = 3


def best_factorizations(
    layer: PreparedLayer,
    ratios: Sequence[float],
    rank_nnz_ratios: Sequence[float],
    *,
    objective: Objective,
    itemsize: int | None = None,
    competing_errors: Sequence[float] = (),
) -> Iterator[Factorization]:
    """Find the best factorization of a layer at each ratio.

    For every ratio, the search over the rank/nnz trade-off descends from the minimum of the neighbouring ratio; each
    step measures the error of an actual factorization. It finds the same shapes as the full grid if the error is
    unimodal. Only the best factorization is swept. The search ends early if an alternative to a dictionary has a
    smaller error: dictionaries fall further short of pruned weights and of codes as the ratio decreases.

    Args:
        layer: the prepared layer.
        ratios: compression ratios of the layer, ascending, in (0, 1).
        rank_nnz_ratios: numbers of atoms per nonzero of a coefficient column to choose from, ascending, >= 1.
        objective: error to minimise: in the original space if `weight`, else that of the output.
        itemsize: bytes per stored number if ratios are of bytes; None if they are of parameters.
        competing_errors: relative output error at each ratio of the alternative to a dictionary; empty without
            alternative. A factorization is not swept, and is the last one, if its error is larger even if sweeps gain
            as much as they ever do.

    Yields:
        One factorization for each ratio that some shape of this layer meets, by decreasing ratio.

    References:
        ROCKET, section 3, layer profiling.
    """
    d_in, d_out = layer.weight.shape
    previous: budget.Shape | None = None
    for ratio, competing_error in zip(
        reversed(ratios), reversed(competing_errors or [math.inf] * len(ratios)), strict=True
    ):
        shapes = budget.candidate_shapes(d_in, d_out, ratio, rank_nnz_ratios, itemsize=itemsize)
        if shapes:
            strides = _STRIDES if previous is None else _STRIDES[1:]
            search = _Search(layer=layer, shapes=shapes, objective=objective)
            search.descend(_start(shapes, previous), strides)
            factorization = search.best
            assert factorization is not None
            previous = factorization.rank, factorization.nnz
            error = factorization.reconstruction_error if competing_errors else 0.0
            wins = error <= _swept_gain(layer) * competing_error
            yield improve(factorization) if wins else factorization
            if not wins:
                return


def may_win(
    layer: PreparedLayer,
    ratio: float,
    rank_nnz_ratios: Sequence[float],
    competing_error: float,
    *,
    itemsize: int | None = None,
) -> bool:
    """Return whether the search at a ratio, and sweeps, may end below a competing error; not if no shape meets it.

    Most that cannot are recognised by the error of few shapes.

    Args:
        layer: the prepared layer.
        ratio: compression ratio of the layer.
        rank_nnz_ratios: as in `best_factorizations`.
        competing_error: relative output error of the alternative.
        itemsize: as in `best_factorizations`.
    """
    d_in, d_out = layer.weight.shape
    shapes = budget.candidate_shapes(d_in, d_out, ratio, rank_nnz_ratios, itemsize=itemsize)
    if not shapes:
        return False
    search = _Search(layer=layer, shapes=shapes, objective="whitened")
    roughly = min((len(shapes) * part // _TRIED for part in range(1, _TRIED)), key=search.error)
    bound = _swept_gain(layer) * competing_error
    if search.error(roughly) > _SEARCH_GAIN * bound:
        return False
    return search.error(search.descend(roughly, _STRIDES)) <= bound


def _swept_gain(layer: PreparedLayer) -> float:
    """Return the most by which the settings' sweeps divide an error."""
    return _SWEEPS_GAIN if layer.settings.sweeps else 1.0


@dataclass(kw_only=True, slots=True)
class _Search:
    """The errors of one search, each measured once; only the best factorization is in memory."""

    layer: PreparedLayer
    shapes: list[budget.Shape]
    objective: Objective
    errors: dict[int, float] = field(default_factory=dict)
    best: Factorization | None = None

    def descend(self, position: int, strides: Sequence[int]) -> int:
        """Descend from the shape at `position` to that of least error, and return its index."""
        for stride in strides:
            while True:
                neighbours = [
                    index for index in (position, position - stride, position + stride) if 0 <= index < len(self.shapes)
                ]
                lowest = min(neighbours, key=self.error)
                if lowest == position:
                    break
                position = lowest
        return position

    def error(self, index: int) -> float:
        """Return the error at a shape; the factorization with the least error so far is kept."""
        if index not in self.errors:
            factorization = factorize_layer(self.layer, *self.shapes[index], sweeps=0)
            by_weight = self.objective == "weight"
            value = factorization.weight_error() if by_weight else factorization.reconstruction_error
            if not self.errors or value < min(self.errors.values()):
                self.best = factorization
            self.errors[index] = value
        return self.errors[index]


def _start(shapes: list[budget.Shape], previous: budget.Shape | None) -> int:
    """Return the index of the shape closest in rank per nonzero to the neighbouring ratio's best; else the middle."""
    if previous is None:
        return len(shapes) // 2
    requested = previous[0] / previous[1]
    return min(range(len(shapes)), key=lambda index: abs(shapes[index][0] / shapes[index][1] - requested))
