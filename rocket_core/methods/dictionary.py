"""Candidates with dictionary and coefficients: low-rank if the coefficients are dense, factored if they are sparse."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.candidates import Candidate, SharedCandidate
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, CompressionConfig, Objective
from rocket_core.layers import LayerFactors
from rocket_core.linalg.factorization import (
    Factorization,
    FactorizerSettings,
    PreparedLayer,
    factorize_layer,
    prepare_layer,
    with_best_dictionary,
)
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, relative_error
from rocket_core.methods.rank_search import best_factorizations, may_win
from rocket_core.sizes import budget

# Sparse coefficients and sweeps together have not been observed to divide the error of a low-rank weight of the same
# size by more than 1.9.
_SPARSE_GAIN = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Factorizations to choose from.

    Attributes:
        settings: the factorizer's settings.
        ratios: compression ratios of the layer, ascending.
        shapes: numbers of atoms per nonzero of a column.
        stored_itemsize: bytes of a stored number.
        budget_itemsize: the same if ratios are of bytes; None if they are of parameters.
    """

    settings: FactorizerSettings
    ratios: Sequence[float]
    shapes: Sequence[float]
    stored_itemsize: int
    budget_itemsize: int | None


def settings_of(config: CompressionConfig) -> FactorizerSettings:
    """Return the factorizer's settings."""
    return FactorizerSettings(**{field.name: getattr(config, field.name) for field in fields(FactorizerSettings)})


def search_of(method: Method, settings: FactorizerSettings, shapes: Sequence[float]) -> Search:
    """Return the search at a method's ratios."""
    return Search(
        settings=settings,
        ratios=method.ratios,
        shapes=shapes,
        stored_itemsize=method.itemsize,
        budget_itemsize=method.budget_itemsize,
    )


def rank_nnz_ratios(config: CompressionConfig) -> tuple[float, ...]:
    """Return the allowed numbers of atoms per nonzero of a column: 1 is low-rank, greater numbers are factored."""
    low_rank = PROFILE_RANK_NNZ_RATIOS[:1] if "low_rank" in config.kinds else ()
    return low_rank + (PROFILE_RANK_NNZ_RATIOS[1:] if "factored" in config.kinds else ())


def prepare(problem: LayerProblem, settings: FactorizerSettings) -> PreparedLayer:
    """Convert the problem to the factorizer's input."""
    basis = problem.eigenbasis()
    return prepare_layer(problem.scaled_weight, basis, settings, dtype=problem.precision)


def profile(
    problem: LayerProblem, search: Search, *, objective: Objective = "whitened", competing_errors: Sequence[float] = ()
) -> list[Candidate]:
    """Return the best factorization of a layer at each ratio.

    Args:
        problem: the layer.
        search: what to choose from.
        objective: error that the search minimises.
        competing_errors: relative error at each ratio of the best other kind of candidate; see `best_factorizations`.
    """
    found = _search(problem, search, objective, competing_errors)
    return [candidate(problem, factorization, search.stored_itemsize) for factorization in found][::-1]


def share(
    problem: LayerProblem, search: Search, *, dictionary_owner: str, competing_errors: Sequence[Sequence[float]] = ()
) -> list[SharedCandidate]:
    """Return the best factorization of a group's concatenated weights at each ratio.

    Arguments are as for `profile`, except that `competing_errors` has a list per member; all are empty if one is.
    """
    together = _together(competing_errors, _member_energies(problem)) if competing_errors else ()
    return [
        _shared_candidate(problem, _serving_all(problem, factorization), dictionary_owner, search.stored_itemsize)
        for factorization in _search(problem, search, "whitened", together)
        if factorization.nnz >= len(problem.output_widths)
    ][::-1]


def _search(
    problem: LayerProblem, search: Search, objective: Objective, competing_errors: Sequence[float]
) -> list[Factorization]:
    if not _is_promising(problem, search, competing_errors):
        return []
    found = best_factorizations(
        prepare(problem, search.settings),
        search.ratios,
        search.shapes,
        objective=objective,
        itemsize=search.budget_itemsize,
        competing_errors=competing_errors,
    )
    return list(found)


def _is_promising(problem: LayerProblem, search: Search, competing_errors: Sequence[float]) -> bool:
    """Return whether a dictionary may be better than what it competes with, at the largest ratio.

    There dictionaries compare best, so that this saves the search at all other ratios, and the eigenbasis in float64.
    Here the computing precision suffices.
    """
    if not competing_errors or problem.statistics.gram is None:
        return True
    if _low_rank_error(problem, search.ratios[-1]) > _SPARSE_GAIN * competing_errors[-1]:
        return False
    weight = problem.scaled_weight.to(problem.precision)
    layer = prepare_layer(weight, problem.rough_basis(), search.settings, dtype=problem.precision)
    return may_win(layer, search.ratios[-1], search.shapes, competing_errors[-1], itemsize=search.budget_itemsize)


def _low_rank_error(problem: LayerProblem, ratio: float) -> float:
    """Return about the least relative error of a low-rank weight at a ratio, from singular values alone.

    For a group this is a lower bound: each member by itself loses as much at the rank that the group can have.
    """
    d_in, d_out = problem.shape
    rank = budget.rank_for(d_in, d_out, budget.parameter_budget(d_in * d_out, ratio), 1.0)
    values = [member.singular_values for member in problem.members] or [problem.rough_basis().singular_values]
    squares = [own.double().square() for own in values if own is not None]
    sums = torch.stack([torch.stack([own[rank:].sum(), own.sum()]) for own in squares]).sum(dim=0)
    return relative_error(*sums.tolist())


def compress(problem: LayerProblem, settings: FactorizerSettings, rank: int, nnz: int) -> CompressedLayer:
    """Compute dictionary and coefficients of a layer, or of a group's concatenated weights."""
    return compressed(problem, factorize_layer(prepare(problem, settings), rank, nnz))


def compressed(problem: LayerProblem, factorization: Factorization) -> CompressedLayer:
    """Convert a factorization to a compressed weight."""
    factorization = _serving_all(problem, factorization)
    factors = LayerFactors(
        dictionary=factorization.dictionary(),
        coefficients=problem.unscaled(factorization.coefficients),
        support=factorization.support,
    )
    return CompressedLayer(factors=factors, errors=factorization.column_errors())


def candidate(problem: LayerProblem, factorization: Factorization, itemsize: int) -> Candidate:
    """Describe a factorization as a candidate.

    Args:
        problem: the layer.
        factorization: factorization of its weight.
        itemsize: bytes of a stored number.
    """
    d_in, d_out = problem.shape
    rank, nnz = factorization.rank, factorization.nnz
    error = factorization.reconstruction_error
    return Candidate(
        kind="low_rank" if nnz == rank * d_out else "factored",
        rank=rank,
        nnz=nnz,
        kept_parameters=budget.kept_parameters(d_in, rank, nnz),
        stored_bytes=budget.factored_bytes(d_in, d_out, rank, nnz, itemsize),
        reconstruction_error=error,
        weight_error=factorization.weight_error(),
        loss=problem.predicted_loss_increase(error**2 * factorization.layer.whitened_energy),
    )


def _serving_all(problem: LayerProblem, factorization: Factorization) -> Factorization:
    """Give one coefficient to each member of a group that has none, since a layer must store at least one.

    The coefficient that helps most is added, and in exchange the smallest of all coefficients is removed.
    """
    if factorization.support is None or len(problem.output_widths) == 1:
        return factorization
    parts = _parts(problem)
    served = torch.stack([factorization.support[:, part].any() for part in parts]).tolist()
    forgotten = [part for part, is_served in zip(parts, served, strict=True) if not is_served]
    if not forgotten:
        return factorization
    layer, atoms = factorization.layer, factorization.whitened_dictionary()
    coefficients, support = factorization.coefficients.clone(), factorization.support.clone()
    energies = atoms.square().sum(dim=0).clamp_min(torch.finfo(atoms.dtype).tiny)[:, None]
    for part in forgotten:
        sizes = coefficients.abs().masked_fill(~support, torch.inf)
        for other in parts:
            if int(support[:, other].sum()) == 1:
                sizes[:, other] = torch.inf
        least = divmod(int(sizes.argmin()), sizes.shape[1])
        coefficients[least], support[least] = 0, False
        products = atoms.mT @ layer.whitened[:, part]
        atom, output = divmod(int((products.square() / energies).argmax()), products.shape[1])
        coefficients[atom, part.start + output] = products[atom, output] / energies[atom, 0]
        support[atom, part.start + output] = True
    return with_best_dictionary(layer, coefficients, support, atoms, nnz=factorization.nnz)


def _parts(problem: LayerProblem) -> list[slice]:
    """Return the output columns of each member."""
    ends = list(itertools.accumulate(problem.output_widths))
    return [slice(end - width, end) for end, width in zip(ends, problem.output_widths, strict=True)]


def _together(errors: Sequence[Sequence[float]], energies: Sequence[float]) -> list[float]:
    """Return a group's relative error at each ratio, from its members' errors and the energies of their outputs."""
    total = sum(energies)
    return [
        relative_error(sum(error**2 * energy for error, energy in zip(at_ratio, energies, strict=True)), total)
        for at_ratio in zip(*errors, strict=True)
    ]


def _member_energies(problem: LayerProblem) -> list[float]:
    """Return ‖SW diag(w)‖² of each member."""
    return [energy for [energy] in _sums(problem, problem.output_energies())]


def _sums(problem: LayerProblem, *values: Float[Tensor, " d_out"]) -> list[list[float]]:
    """Return the sums of each member's part of some values of all outputs."""
    sums = [torch.stack([own[part].sum().double() for own in values]) for part in _parts(problem)]
    found: list[list[float]] = torch.stack(sums).tolist()
    return found


def _shared_candidate(
    problem: LayerProblem, factorization: Factorization, dictionary_owner: str, itemsize: int
) -> SharedCandidate:
    d_in, _ = problem.shape
    layer, rank = factorization.layer, factorization.rank
    errors = factorization.column_errors()
    energies = layer.basis.directions.double().square() @ layer.basis.singular_values.double().square()
    removed = (layer.weight - factorization.dictionary() @ factorization.coefficients).square().sum(dim=0)
    lengths = layer.weight.square().sum(dim=0)
    members = []
    support = factorization.support
    dense = support is None
    kept = torch.full_like(errors, rank) if support is None else support.sum(dim=0).to(errors)
    sums = _sums(problem, errors, energies, removed, lengths, kept)
    for index, (d_out, (error, energy, distance, length, nonzeros)) in enumerate(
        zip(problem.output_widths, sums, strict=True)
    ):
        nnz, atoms = int(nonzeros), rank * d_in if index == 0 else 0
        members.append(
            Candidate(
                kind="low_rank" if dense else "factored",
                rank=rank,
                nnz=nnz,
                dictionary=dictionary_owner,
                kept_parameters=atoms + nnz,
                # Supports are chosen jointly; with as many nonzeros in total, this member may need its mask.
                stored_bytes=(atoms + nnz) * itemsize + (0 if dense else budget.mask_bytes(rank, d_out)),
                reconstruction_error=relative_error(error, energy),
                weight_error=relative_error(distance, length),
                loss=problem.predicted_loss_increase(error, member=index),
            )
        )
    return SharedCandidate(members=tuple(members))
