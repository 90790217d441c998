"""Search for the best trade-off of rank against nonzeros at each ratio (paper, section 3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rocket_core import budget
from rocket_core.config import Objective
from rocket_core.linalg.factorization import Factorization, PreparedLayer, factorize_layer, improve

# At a fixed budget the error falls and then rises with the rank, so a coarse and then a fine descent find its minimum;
# from the minimum of the neighbouring ratio a fine one does.
_STRIDES = (2, 1)
# Heuristic bounds, as multiples of the competing error. Sweeps have not been observed to lower an error by more than a
# sixth, so above the first bound sweeps cannot help. Dictionaries fall further short of pruned weights as the ratio
# decreases, so above the second bound, which leaves room for errors of both, smaller ratios need not be tried.
_SWEPT_WITHIN = 1.25
_CONTINUED_WITHIN = 1.25
# Shapes that are tried to see whether a search is worth its time are evenly among all, one less than this.
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
    unimodal. Only the best factorization is swept. The search ends early if an alternative to a dictionary has a far
    smaller error.

    Args:
        layer: the prepared layer.
        ratios: compression ratios of the layer, ascending, in (0, 1).
        rank_nnz_ratios: numbers of atoms per nonzero of a coefficient column to choose from, ascending, >= 1.
        objective: error to minimise: in the original space if `weight`, else that of the output.
        itemsize: bytes per stored number if ratios are of bytes; None if they are of parameters.
        competing_errors: relative output error at each ratio of the alternative to a dictionary; empty without
            alternative. A factorization is not swept, and is the last one, if its error is over 1.25 times that.

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
            factorization = _descend(layer, shapes, _start(shapes, previous), objective, strides)
            previous = factorization.rank, factorization.nnz
            error = factorization.reconstruction_error() if competing_errors else 0.0
            yield factorization if error > _SWEPT_WITHIN * competing_error else improve(factorization)
            if error > _CONTINUED_WITHIN * competing_error:
                return


def least_error_roughly(
    layer: PreparedLayer, ratio: float, rank_nnz_ratios: Sequence[float], *, itemsize: int | None = None
) -> float | None:
    """Return the least relative output error of a few shapes at a ratio; None if no shape meets it.

    The search of `best_factorizations` has not been observed to end more than a tenth below it.

    Args:
        layer: the prepared layer.
        ratio: compression ratio of the layer.
        rank_nnz_ratios: as in `best_factorizations`.
        itemsize: as in `best_factorizations`.
    """
    d_in, d_out = layer.weight.shape
    shapes = budget.candidate_shapes(d_in, d_out, ratio, rank_nnz_ratios, itemsize=itemsize)
    tried = [shapes[len(shapes) * part // _TRIED] for part in range(1, _TRIED)] if shapes else []
    errors = [factorize_layer(layer, *shape, sweeps=0).reconstruction_error() for shape in dict.fromkeys(tried)]
    return min(errors, default=None)


def _descend(
    layer: PreparedLayer, shapes: list[budget.Shape], position: int, objective: str, strides: Sequence[int]
) -> Factorization:
    """Descend from `position` to the shape of least error, with only the best factorization in memory."""
    search = _Search(layer=layer, shapes=shapes, objective=objective)
    for stride in strides:
        while True:
            neighbours = [
                index for index in (position, position - stride, position + stride) if 0 <= index < len(shapes)
            ]
            lowest = min(neighbours, key=search.error)
            if lowest == position:
                break
            position = lowest
    assert search.best is not None
    return search.best


@dataclass(kw_only=True, slots=True)
class _Search:
    """The errors of one search, each measured once."""

    layer: PreparedLayer
    shapes: list[budget.Shape]
    objective: str
    errors: dict[int, float] = field(default_factory=dict)
    best: Factorization | None = None

    def error(self, index: int) -> float:
        """Return the error at a shape; the factorization with the least error so far is kept."""
        if index not in self.errors:
            factorization = factorize_layer(self.layer, *self.shapes[index], sweeps=0)
            by_weight = self.objective == "weight"
            value = factorization.weight_error() if by_weight else factorization.reconstruction_error()
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
