"""Candidates that keep a layer's own weights, most of them zero."""

from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core import budget
from rocket_core.candidates import Candidate
from rocket_core.methods.problem import Compressed, LayerProblem, output_errors
from rocket_core.modules import LayerFactors
from rocket_core.pruning import prune_path, refit

SPARSE_RATIOS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Ratios of the candidates; between them the allocation adds single entries."""

# The finer the steps, the better the choice of what goes next.
_STEP = 0.05


def _path(d_in: int, d_out: int, wanted: Sequence[int], itemsize: int | None) -> list[int]:
    """Nonzeros on the way to the least of those wanted, falling, all of these among them.

    Args:
        d_in: input features.
        d_out: output features.
        wanted: nonzeros at which the path is to stop over.
        itemsize: bytes of a stored number, where ratios are of bytes.
    """
    steps = (round(_STEP * step, 3) for step in range(1, round(1 / _STEP)))
    way = (budget.sparse_nnz(d_in, d_out, ratio, itemsize=itemsize) for ratio in steps)
    return sorted({*wanted, *(nnz for nnz in way if nnz > min(wanted))}, reverse=True)


def counts(d_in: int, d_out: int, ratios: Sequence[float], itemsize: int | None) -> list[int]:
    """Nonzeros at ratios, falling, where any are left."""
    return [nnz for ratio in ratios if (nnz := budget.sparse_nnz(d_in, d_out, ratio, itemsize=itemsize)) >= 1]


def profile(problem: LayerProblem, itemsizes: tuple[int, int | None]) -> list[Candidate]:
    """A candidate at each of `SPARSE_RATIOS`.

    Args:
        problem: the layer.
        itemsizes: bytes of a stored number; the same if ratios are of bytes, None if they are of parameters.
    """
    itemsize, budget_itemsize = itemsizes
    wanted = counts(*problem.shape, SPARSE_RATIOS, budget_itemsize)
    if not wanted:
        return []
    weight = problem.scaled_weight.to(problem.precision)
    gram = problem.gram()
    energy = float((weight * (gram @ weight)).sum(dtype=torch.float64))
    return [
        candidate(problem, weight, pruned.weight, pruned.nnz, (pruned.error, energy), itemsize)
        for pruned in prune_path(weight, gram, _path(*problem.shape, wanted, budget_itemsize))
        if pruned.nnz in wanted
    ]


def candidate(
    problem: LayerProblem,
    weight: Float[Tensor, "d_in d_out"],
    pruned: Float[Tensor, "d_in d_out"],
    nnz: int,
    errors: tuple[float, float],
    itemsize: int,
) -> Candidate:
    """Describes a pruned weight.

    Args:
        problem: the layer.
        weight: W diag(w).
        pruned: what is left of it.
        nnz: entries kept.
        errors: ‖S(W - W̃)diag(w)‖² and ‖SW diag(w)‖².
        itemsize: bytes of a stored number.
    """
    error, energy = errors
    removed = torch.linalg.matrix_norm((weight - pruned).double())
    length = torch.linalg.matrix_norm(weight.double())
    return Candidate(
        kind="sparse",
        nnz=nnz,
        kept_parameters=nnz,
        stored_bytes=budget.sparse_bytes(*problem.shape, nnz, itemsize),
        reconstruction_error=(error / energy) ** 0.5 if energy > 0 else 0.0,
        weight_error=float(removed / length) if float(length) > 0 else 0.0,
        loss=problem.loss(error),
    )


def compress(problem: LayerProblem, nnz: int, budget_itemsize: int | None) -> Compressed:
    """The weight pruned to a number of nonzeros, on the path that its profile took."""
    weight = problem.scaled_weight.to(problem.precision)
    [pruned] = deque(prune_path(weight, problem.gram(), _path(*problem.shape, (nnz,), budget_itemsize)), maxlen=1)
    exact = refit(weight, problem.gram(), pruned)
    return stored(problem, weight, exact.weight, exact.support)


def stored(
    problem: LayerProblem,
    weight: Float[Tensor, "d_in d_out"],
    pruned: Float[Tensor, "d_in d_out"],
    support: Bool[Tensor, "d_in d_out"],
) -> Compressed:
    """The result for a pruned weight; `weight` and `pruned` with column weights."""
    factors = LayerFactors(dictionary=None, coefficients=problem.unscaled(pruned), support=support)
    return Compressed(factors=factors, errors=output_errors(problem.gram(), weight - pruned))
