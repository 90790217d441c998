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

# Steps of a tenth of a layer's entries: between them the allocation adds single entries, so finer ones gain little.
SPARSE_RATIOS = tuple(round(0.1 * step, 1) for step in range(1, 10))


def counts(d_in: int, d_out: int, ratios: Sequence[float], itemsize: int | None) -> list[int]:
    """Nonzeros at ratios, falling, where any are left."""
    return [nnz for ratio in ratios if (nnz := budget.sparse_nnz(d_in, d_out, ratio, itemsize=itemsize)) >= 1]


def profile(problem: LayerProblem, nonzeros: Sequence[int], itemsize: int) -> list[Candidate]:
    """A candidate for each of falling numbers of nonzeros."""
    weight = problem.scaled_weight.to(problem.precision)
    gram = problem.gram()
    energy = float((weight * (gram @ weight)).sum(dtype=torch.float64))
    return [
        candidate(problem, weight, pruned.weight, pruned.nnz, (pruned.error, energy), itemsize)
        for pruned in prune_path(weight, gram, nonzeros)
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


def compress(problem: LayerProblem, nonzeros: Sequence[int]) -> Compressed:
    """The pruned weight at the last of falling numbers of nonzeros."""
    weight = problem.scaled_weight.to(problem.precision)
    [pruned] = deque(prune_path(weight, problem.gram(), nonzeros), maxlen=1)
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
