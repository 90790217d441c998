"""Sparse candidates: a layer's own weights, most of them zero."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rocket_core import budget
from rocket_core.candidates import Candidate
from rocket_core.layers import LayerFactors
from rocket_core.linalg.least_squares import UnitGram
from rocket_core.linalg.pruning import prune, prune_path
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors

SPARSE_RATIOS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Ratios of the candidates; between them the allocation adds single entries."""

# Ratios at which a layer is pruned to measure errors; errors are smooth enough to interpolate the rest.
_MEASURED_RATIOS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
# How errors grow with the ratio is nearly the same for all outputs, so it is measured on a sample: at least this many
# outputs, and at least this share. Their scale can differ greatly; it is measured on all outputs at the first ratio.
_SAMPLED_OUTPUTS = 128
_SAMPLED_PART = 1 / 8
# Replaces zero before taking logarithms.
_NEXT_TO_ZERO = 1e-200


def counts(d_in: int, d_out: int, ratios: Sequence[float], itemsize: int | None) -> list[int]:
    """Return the numbers of nonzeros at ascending ratios, without those below 1."""
    return [nnz for ratio in ratios if (nnz := budget.sparse_nnz(d_in, d_out, ratio, itemsize=itemsize)) >= 1]


def profile(problem: LayerProblem, *, stored_itemsize: int, budget_itemsize: int | None) -> list[Candidate]:
    """Return a candidate at each of `SPARSE_RATIOS`.

    Errors are measured at some ratios, for wide layers on a sample of the outputs, and interpolated linearly between
    them: the logarithm of the error over that of the ratio. All are steps of one pruning path; compression optimises
    the chosen candidate by itself, and so ends about a tenth below the predicted error, at any ratio and for any layer.

    Args:
        problem: the layer.
        stored_itemsize: bytes of a stored number.
        budget_itemsize: the same if ratios are of bytes; None if they are of parameters.
    """
    weight = problem.scaled_weight.to(problem.precision)
    energies = (weight * (problem.gram() @ weight)).sum(dim=0, dtype=torch.float64)
    stops = counts(*problem.shape, _MEASURED_RATIOS, budget_itemsize)
    wanted = counts(*problem.shape, SPARSE_RATIOS, budget_itemsize)
    measured = _measure(weight, energies, UnitGram.of(problem.gram()), stops)
    return [
        Candidate(
            kind="sparse",
            nnz=nnz,
            kept_parameters=nnz,
            stored_bytes=budget.sparse_bytes(*problem.shape, nnz, stored_itemsize),
            reconstruction_error=error,
            weight_error=distance,
            loss=problem.predicted_loss_increase(error**2 * float(energies.sum())),
        )
        for nnz, (error, distance) in zip(wanted, _read_off(measured, stops, wanted, weight.numel()), strict=True)
    ]


def _measure(
    weight: Float[Tensor, "d_in d_out"], energies: Float[Tensor, " d_out"], unit: UnitGram, stops: Sequence[int]
) -> Float64[np.ndarray, "stops 2"]:
    """Return the relative errors of the output and of the weight at the given numbers of nonzeros."""
    d_out = len(energies)
    number = min(d_out, max(_SAMPLED_OUTPUTS, math.ceil(_SAMPLED_PART * d_out)))
    if number == d_out:
        return _errors(weight, energies, unit, stops)
    # Sample evenly from outputs of large and of small energy.
    sample = energies.argsort()[((torch.arange(number) + 0.5) * d_out / number).long()]
    part = _errors(
        weight[:, sample].contiguous(), energies[sample], unit, [max(1, stop * number // d_out) for stop in stops]
    )
    whole = _errors(weight, energies, unit, stops[:1])
    scale = np.divide(whole, part[:1], out=np.ones_like(whole), where=part[:1] > 0)
    scaled: Float64[np.ndarray, "stops 2"] = np.minimum(part * scale, 1.0)
    return scaled


def _errors(
    weight: Float[Tensor, "d_in d_out"], energies: Float[Tensor, " d_out"], unit: UnitGram, stops: Sequence[int]
) -> Float64[np.ndarray, "stops 2"]:
    energy, length = float(energies.sum()), float(torch.linalg.matrix_norm(weight.double()))
    return np.array(
        [
            (
                (pruned.error / energy) ** 0.5 if energy > 0 else 0.0,
                float(torch.linalg.matrix_norm((weight - pruned.weight).double())) / length if length > 0 else 0.0,
            )
            for pruned in prune_path(weight, unit, stops)
        ]
    ).reshape(-1, 2)


def _read_off(
    measured: Float64[np.ndarray, "stops 2"], stops: Sequence[int], wanted: Sequence[int], size: int
) -> Float64[np.ndarray, "wanted 2"]:
    """Interpolate errors at other numbers of nonzeros, as powers of the ratio between the stops and before the first.

    Both `stops` and `wanted` are decreasing.
    """
    if len(stops) < 2:
        return np.repeat(measured[:1], len(wanted), axis=0)
    at = np.log1p(-np.array(stops) / size)
    logarithms = np.log(np.maximum(measured, _NEXT_TO_ZERO))
    at, logarithms = (np.concatenate([2 * values[:1] - values[1:2], values]) for values in (at, logarithms))
    ratios = np.log1p(-np.array(wanted) / size)
    found: Float64[np.ndarray, "wanted 2"] = np.exp(
        np.stack([np.interp(ratios, at, column) for column in logarithms.T], axis=1)
    )
    found[found <= _NEXT_TO_ZERO * (1 + 1e-9)] = 0
    return found


def candidate(
    problem: LayerProblem,
    weight: Float[Tensor, "d_in d_out"],
    pruned: Float[Tensor, "d_in d_out"],
    nnz: int,
    errors: tuple[float, float],
    itemsize: int,
) -> Candidate:
    """Describe a pruned weight as a candidate.

    Args:
        problem: the layer.
        weight: W diag(w).
        pruned: W̃ diag(w).
        nnz: number of entries kept.
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
        loss=problem.predicted_loss_increase(error),
    )


def compress(problem: LayerProblem, nnz: int) -> CompressedLayer:
    """Prune the weight to a number of nonzeros."""
    weight = problem.scaled_weight.to(problem.precision)
    pruned = prune(weight, UnitGram.of(problem.gram()), nnz)
    factors = LayerFactors(dictionary=None, coefficients=problem.unscaled(pruned.weight), support=pruned.support)
    return CompressedLayer(factors=factors, errors=pruned.errors)


def errors_at(
    candidates: Sequence[Candidate], shape: tuple[int, int], ratios: Sequence[float], itemsize: int | None
) -> list[float]:
    """Return the relative output errors that sparse candidates predict at ratios; their logarithms are interpolated.

    Args:
        candidates: sparse candidates of a layer, at least one.
        shape: `(d_in, d_out)` of the layer.
        ratios: compression ratios.
        itemsize: bytes of a stored number if ratios are of bytes; None if they are of parameters.
    """
    whole = shape[0] * shape[1] * (itemsize or 1)
    sizes = [candidate.kept_parameters if itemsize is None else candidate.stored_bytes for candidate in candidates]
    errors = np.maximum([candidate.reconstruction_error for candidate in candidates], np.finfo(float).tiny)
    order = np.argsort(sizes)[::-1]
    at = 1 - np.array(sizes)[order] / whole
    return [float(value) for value in np.exp(np.interp(ratios, at, np.log(errors[order])))]


def stored(
    problem: LayerProblem,
    weight: Float[Tensor, "d_in d_out"],
    pruned: Float[Tensor, "d_in d_out"],
    support: Bool[Tensor, "d_in d_out"],
) -> CompressedLayer:
    """Return the compressed form of a pruned weight; `weight` and `pruned` include the output weights."""
    factors = LayerFactors(dictionary=None, coefficients=problem.unscaled(pruned), support=support)
    return CompressedLayer(factors=factors, errors=output_errors(problem.gram(), weight - pruned))
