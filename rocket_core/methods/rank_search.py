"""The best factorization of a layer at each ratio, found by descent over rank against nonzeros (paper, section 3)."""

import math
from collections.abc import Iterator, Sequence

from rocket_core import budget
from rocket_core.config import Objective
from rocket_core.linalg.factorization import Factorization, PreparedLayer, factorize_layer, improve

# At a fixed budget the error falls and then rises with the rank, so a coarse walk and a fine one find its minimum.
_STRIDES = (2, 1)
# Times the error of what is at hand anyway. Sweeps have not been seen to lower an error by more than a sixth, so beyond
# the first no sweep can help; and the smaller the ratio, the further dictionaries are behind pruned weights, so beyond
# the second none of the smaller ones needs to be looked at.
_SWEPT_WITHIN = 1.25
_CONTINUED_WITHIN = 1.5


def best_factorizations(
    layer: PreparedLayer,
    ratios: Sequence[float],
    rank_nnz_ratios: Sequence[float],
    *,
    objective: Objective,
    itemsize: int | None = None,
    rivals: Sequence[float] = (),
) -> Iterator[Factorization]:
    """Find the best factorization of a layer at each ratio.

    For every ratio the rank/nnz trade-off is descended from where the neighbouring ratio had its minimum; each step
    measures the error of a true factorization. Same best shapes as the full grid where the error is unimodal. Only the
    best one is swept. Where the layer can be stored otherwise with far less error, that ends the search.

    Args:
        layer: the prepared layer.
        ratios: compression ratios of the layer, ascending, in (0, 1).
        rank_nnz_ratios: atoms per nonzero of a coefficient column to choose from, ascending, >= 1.
        objective: error that the search lowers: that in the original space if `weight`, else that of the output.
        itemsize: bytes per stored number, where ratios are of bytes; None where they are of parameters.
        rivals: relative error of the output at each ratio if the layer is stored otherwise; empty if it cannot be.
            Where a factorization has a quarter more it is not swept, and where it has half more it is the last.

    Yields:
        By falling ratio, one factorization for each that some shape of this layer meets.

    References:
        ROCKET, section 3, layer profiling.
    """
    d_in, d_out = layer.weight.shape
    previous: budget.Shape | None = None
    for ratio, rival in zip(reversed(ratios), reversed(rivals or [math.inf] * len(ratios)), strict=True):
        shapes = budget.candidate_shapes(d_in, d_out, ratio, rank_nnz_ratios, itemsize=itemsize)
        if shapes:
            factorization = _descend(layer, shapes, _start(shapes, previous), objective)
            previous = factorization.rank, factorization.nnz
            error = factorization.reconstruction_error() if rivals else 0.0
            yield factorization if error > _SWEPT_WITHIN * rival else improve(factorization)
            if error > _CONTINUED_WITHIN * rival:
                return


def _descend(layer: PreparedLayer, shapes: list[budget.Shape], position: int, objective: str) -> Factorization:
    """Walk from `position` to the shape of least error; keeps only the best factorization in memory."""
    errors: dict[int, float] = {}
    best: list[Factorization] = []

    def error(index: int) -> float:
        if index not in errors:
            factorization = factorize_layer(layer, *shapes[index], sweeps=0)
            value = factorization.weight_error() if objective == "weight" else factorization.reconstruction_error()
            if not errors or value < min(errors.values()):
                best[:] = [factorization]
            errors[index] = value
        return errors[index]

    for stride in _STRIDES:
        while True:
            neighbours = [
                index for index in (position, position - stride, position + stride) if 0 <= index < len(shapes)
            ]
            lowest = min(neighbours, key=error)
            if lowest == position:
                break
            position = lowest
    return best[0]


def _start(shapes: list[budget.Shape], previous: budget.Shape | None) -> int:
    """Return the shape closest in rank per nonzero to the neighbouring ratio's best; the middle if there is none."""
    if previous is None:
        return len(shapes) // 2
    wanted = previous[0] / previous[1]
    return min(range(len(shapes)), key=lambda index: abs(shapes[index][0] / shapes[index][1] - wanted))
