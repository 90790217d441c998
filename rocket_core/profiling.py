"""Profiles of a layer: the best factorization at each ratio, found by descent over rank against nonzeros (paper, 3)."""

from collections.abc import Sequence

from rocket_core import budget
from rocket_core.candidates import Candidate
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS, Objective
from rocket_core.factorization import Factorization, PreparedLayer, factorize_layer

# At a fixed budget the error falls and then rises with the rank, so a coarse walk and a fine one find its minimum.
_STRIDES = (2, 1)


def profile_layer(
    layer: PreparedLayer,
    *,
    objective: Objective,
    itemsize: int,
    dense_bytes: int | None = None,
    ratios: Sequence[float] = PROFILE_RATIOS,
    rank_nnz_ratios: Sequence[float] = PROFILE_RANK_NNZ_RATIOS,
) -> tuple[Candidate, ...]:
    """Finds the best candidate of a layer at each ratio.

    For every ratio the rank/nnz trade-off is descended from where the neighbouring ratio had its minimum; each step
    measures the error of a true factorization. Same best candidates as the full grid where the error is unimodal.

    Args:
        layer: the prepared layer.
        objective: error that the search lowers; both are recorded.
        itemsize: bytes per stored number of a factored layer.
        dense_bytes: bytes of the layer as it is stored; None takes `itemsize` for every number.
        ratios: compression ratios of the layer, ascending, in (0, 1).
        rank_nnz_ratios: atoms per nonzero of a coefficient column to choose from, ascending, >= 1.

    Returns:
        The dense candidate, then by falling kept parameters one factored candidate for each ratio that some shape of
        this layer meets.

    References:
        ROCKET, section 3, layer profiling.
    """
    d_in, d_out = layer.weight.shape
    factored: list[Candidate] = []
    previous: budget.Shape | None = None
    for ratio in reversed(ratios):
        shapes = budget.candidate_shapes(d_in, d_out, ratio, rank_nnz_ratios)
        if shapes:
            factorization = _descend(layer, shapes, _start(shapes, previous), objective)
            previous = _shape(factorization)
            factored.append(_candidate(factorization, itemsize))
    dense = Candidate(
        kind="dense",
        kept_parameters=d_in * d_out,
        stored_bytes=budget.dense_bytes(d_in, d_out, itemsize) if dense_bytes is None else dense_bytes,
        reconstruction_error=0.0,
        weight_error=0.0,
    )
    return dense, *reversed(factored)


def _descend(layer: PreparedLayer, shapes: list[budget.Shape], position: int, objective: str) -> Factorization:
    """Walks from `position` to the shape of least error; keeps only the best factorization in memory."""
    errors: dict[int, float] = {}
    best: list[Factorization] = []

    def error(index: int) -> float:
        if index not in errors:
            factorization = factorize_layer(layer, *shapes[index])
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
    """The shape closest in rank per nonzero to the neighbouring ratio's best; the middle if there is none."""
    if previous is None:
        return len(shapes) // 2
    wanted = previous[0] / previous[1]
    return min(range(len(shapes)), key=lambda index: abs(shapes[index][0] / shapes[index][1] - wanted))


def _shape(factorization: Factorization) -> budget.Shape:
    coefficients = factorization.coefficients
    support = factorization.support
    return coefficients.shape[0], coefficients.numel() if support is None else int(support.sum())


def _candidate(factorization: Factorization, itemsize: int) -> Candidate:
    rank, nnz = _shape(factorization)
    d_in, d_out = factorization.layer.weight.shape
    return Candidate(
        kind="factored",
        rank=rank,
        nnz=nnz,
        kept_parameters=budget.kept_parameters(d_in, rank, nnz),
        stored_bytes=budget.factored_bytes(d_in, d_out, rank, nnz, itemsize),
        reconstruction_error=factorization.reconstruction_error(),
        weight_error=factorization.weight_error(),
    )
