"""Candidates of dictionary and coefficients: low-rank if the coefficients are dense, factored if they are sparse."""

import itertools
from collections.abc import Sequence

import torch

from rocket_core import budget
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
from rocket_core.methods.layer_problem import Compressed, LayerProblem
from rocket_core.methods.rank_search import best_factorizations


def settings_of(config: CompressionConfig) -> FactorizerSettings:
    """Return what the factorizer is told."""
    return FactorizerSettings(
        importance_balance=config.importance_balance,
        over_sparsification=config.over_sparsification,
        ridge=config.ridge,
        sparsification=config.sparsification,
        sweeps=config.sweeps,
        metric=config.metric,
    )


def rank_nnz_ratios(config: CompressionConfig) -> tuple[float, ...]:
    """Atoms per nonzero of a column to choose from: 1 is low-rank, what lies above it factored."""
    low_rank = PROFILE_RANK_NNZ_RATIOS[:1] if "low_rank" in config.kinds else ()
    return low_rank + (PROFILE_RANK_NNZ_RATIOS[1:] if "factored" in config.kinds else ())


def prepare(problem: LayerProblem, settings: FactorizerSettings) -> PreparedLayer:
    """Return the problem in the factorizer's terms."""
    basis = problem.eigenbasis()
    return prepare_layer(problem.scaled_weight, basis, settings, dtype=problem.precision)


def profile(
    problem: LayerProblem,
    settings: FactorizerSettings,
    *,
    ratios: Sequence[float],
    shapes: Sequence[float],
    objective: Objective,
    itemsizes: tuple[int, int | None],
    rivals: Sequence[float] = (),
) -> list[Candidate]:
    """Return the best factorization of a layer at each ratio.

    Args:
        problem: the layer.
        settings: the factorizer's.
        ratios: compression ratios of the layer, ascending.
        shapes: atoms per nonzero of a column to choose from.
        objective: error that the search lowers.
        itemsizes: bytes of a stored number; the same if ratios are of bytes, None if they are of parameters.
        rivals: relative error at each ratio if the layer is stored otherwise; see `best_factorizations`.
    """
    layer = prepare(problem, settings)
    found = best_factorizations(layer, ratios, shapes, objective=objective, itemsize=itemsizes[1], rivals=rivals)
    return [candidate(problem, factorization, itemsizes[0]) for factorization in found][::-1]


def share(
    problem: LayerProblem,
    settings: FactorizerSettings,
    *,
    ratios: Sequence[float],
    shapes: Sequence[float],
    owner: str,
    itemsizes: tuple[int, int | None],
    rivals: Sequence[Sequence[float]] = (),
) -> list[SharedCandidate]:
    """Return the best factorization of a group's weights side by side at each ratio.

    Arguments as for `profile`, but `rivals` are of each member; the others' are empty if one's are.
    """
    layer = prepare(problem, settings)
    together = _together(rivals, _output_energies(problem, layer)) if rivals else ()
    found = best_factorizations(layer, ratios, shapes, objective="whitened", itemsize=itemsizes[1], rivals=together)
    return [
        _shared_candidate(problem, _serving_all(problem, factorization), owner, itemsizes[0])
        for factorization in found
        if factorization.nnz >= len(problem.members)
    ][::-1]


def compress(problem: LayerProblem, settings: FactorizerSettings, rank: int, nnz: int) -> Compressed:
    """Dictionary and coefficients of a layer, or of a group's weights side by side."""
    return compressed(problem, factorize_layer(prepare(problem, settings), rank, nnz))


def compressed(problem: LayerProblem, factorization: Factorization) -> Compressed:
    """Return the result for a factorization."""
    factorization = _serving_all(problem, factorization)
    factors = LayerFactors(
        dictionary=factorization.dictionary(),
        coefficients=problem.unscaled(factorization.coefficients),
        support=factorization.support,
    )
    return Compressed(factors=factors, errors=factorization.column_errors())


def candidate(problem: LayerProblem, factorization: Factorization, itemsize: int) -> Candidate:
    """Describe a factorization.

    Args:
        problem: the layer.
        factorization: of its weight.
        itemsize: bytes of a stored number.
    """
    d_in, d_out = problem.shape
    rank, nnz = factorization.rank, factorization.nnz
    error = factorization.reconstruction_error()
    return Candidate(
        kind="low_rank" if nnz == rank * d_out else "factored",
        rank=rank,
        nnz=nnz,
        kept_parameters=budget.kept_parameters(d_in, rank, nnz),
        stored_bytes=budget.factored_bytes(d_in, d_out, rank, nnz, itemsize),
        reconstruction_error=error,
        weight_error=factorization.weight_error(),
        loss=problem.loss(error**2 * factorization.layer.whitened_energy),
    )


def _serving_all(problem: LayerProblem, factorization: Factorization) -> Factorization:
    """Return each member of a group that is left without a coefficient one, since a layer stores at least one.

    That is the one which helps most; for it the least of the coefficients goes.
    """
    if factorization.support is None or len(problem.members) == 1:
        return factorization
    parts = _parts(problem)
    forgotten = [part for part in parts if not bool(factorization.support[:, part].any())]
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
    return with_best_dictionary(layer, coefficients, support, atoms)


def _parts(problem: LayerProblem) -> list[slice]:
    """Return the outputs of each member."""
    ends = list(itertools.accumulate(problem.members))
    return [slice(end - width, end) for end, width in zip(ends, problem.members, strict=True)]


def _together(errors: Sequence[Sequence[float]], energies: Sequence[float]) -> list[float]:
    """Relative errors of a group at each ratio, from those of its members and the energies of their outputs."""
    whole = sum(energies)
    return [
        _root_of_share(sum(error**2 * energy for error, energy in zip(at_ratio, energies, strict=True)), whole)
        for at_ratio in zip(*errors, strict=True)
    ]


def _output_energies(problem: LayerProblem, layer: PreparedLayer) -> list[float]:
    """‖SW diag(w)‖² of each member."""
    energies = layer.basis.directions.double().square() @ layer.basis.singular_values.double().square()
    return [float(energies[part].sum()) for part in _parts(problem)]


def _shared_candidate(
    problem: LayerProblem, factorization: Factorization, owner: str, itemsize: int
) -> SharedCandidate:
    d_in, _ = problem.shape
    layer, rank = factorization.layer, factorization.rank
    errors = factorization.column_errors()
    energies = _output_energies(problem, layer)
    removed = (layer.weight - factorization.dictionary() @ factorization.coefficients).square().sum(dim=0)
    lengths = layer.weight.square().sum(dim=0)
    members = []
    dense = factorization.support is None
    for index, (part, d_out) in enumerate(zip(_parts(problem), problem.members, strict=True)):
        nnz = rank * d_out if factorization.support is None else int(factorization.support[:, part].sum())
        atoms = rank * d_in if index == 0 else 0
        error = float(errors[part].sum())
        members.append(
            Candidate(
                kind="low_rank" if dense else "factored",
                rank=rank,
                nnz=nnz,
                dictionary=owner,
                kept_parameters=atoms + nnz,
                # Where supports are chosen together, another choice of as many nonzeros may need this member's mask.
                stored_bytes=(atoms + nnz) * itemsize + (0 if dense else budget.mask_bytes(rank, d_out)),
                reconstruction_error=_root_of_share(error, energies[index]),
                weight_error=_root_of_share(float(removed[part].sum()), float(lengths[part].sum())),
                loss=problem.loss(error),
            )
        )
    return SharedCandidate(members=tuple(members))


def _root_of_share(part: float, whole: float) -> float:
    return (max(0.0, part) / whole) ** 0.5 if whole > 0 else 0.0
