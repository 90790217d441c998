"""Sparse candidates: a layer's own weights, most of them zero."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.layers import LayerFactors
from rocket_core.linalg.least_squares import inner_product, output_errors
from rocket_core.linalg.pruning import prune, split_path
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, relative_error
from rocket_core.methods.sampled_outputs import SampledOutputs, spread_outputs
from rocket_core.sizes import budget

SPARSE_RATIOS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Ratios of the candidates; between them the allocation adds single entries."""

# Ratios at which a layer is pruned to measure errors; errors are smooth enough to interpolate the rest.
_MEASURED_RATIOS = (0.1, 0.35, 0.6, 0.8, 0.95)
# Errors are measured on a sample of the outputs: at least this many, and this share, but no more entries than the last.
_SAMPLED_OUTPUTS = 128
_SAMPLED_PART = 1 / 8
_MOST_SAMPLED = 2**20
# Scores that suffice to find which are the least.
_ORDERED_SCORES = 2**18
# Outputs that suffice to see whether pruned weights can come near codes.
_ROUGHLY_SAMPLED = 64
# Replaces zero before taking logarithms.
_NEXT_TO_ZERO = 1e-200


def counts(d_in: int, d_out: int, ratios: Sequence[float], itemsize: int | None) -> list[int]:
    """Return the numbers of nonzeros at ascending ratios, without those below 1."""
    return [nnz for ratio in ratios if (nnz := budget.sparse_nnz(d_in, d_out, ratio, itemsize=itemsize)) >= 1]


def profile(problem: LayerProblem, *, stored_itemsize: int, budget_itemsize: int | None) -> list[Candidate]:
    """Return a candidate at each of `SPARSE_RATIOS`.

    Errors are measured at some ratios, for wide layers on a sample of the outputs, and interpolated linearly between
    them: the logarithm of the error over that of the ratio. All are steps of one pruning path; compression optimises
    the chosen candidate by itself, and so ends up to a tenth below the predicted error, and hardly above it.

    Args:
        problem: the layer.
        stored_itemsize: bytes of a stored number.
        budget_itemsize: the same if ratios are of bytes; None if they are of parameters.
    """
    weight = problem.scaled_weight.to(problem.precision)
    energy = float(problem.output_energies().sum())
    stops = counts(*problem.shape, _MEASURED_RATIOS, budget_itemsize)
    wanted = counts(*problem.shape, SPARSE_RATIOS, budget_itemsize)
    measured = _measure(problem, weight, stops)
    return [
        Candidate(
            kind="sparse",
            nnz=nnz,
            kept_parameters=nnz,
            stored_bytes=budget.sparse_bytes(*problem.shape, nnz, stored_itemsize),
            reconstruction_error=error,
            weight_error=distance,
            loss=problem.predicted_loss_increase(error**2 * energy),
        )
        for nnz, (error, distance) in zip(wanted, _read_off(measured, stops, wanted, weight.numel()), strict=True)
    ]


def _measure(
    problem: LayerProblem, weight: Float[Tensor, "d_in d_out"], stops: Sequence[int]
) -> Float64[np.ndarray, "stops 2"]:
    """Return the relative errors of the output and of the weight at the given numbers of nonzeros."""
    energies = problem.output_energies()
    d_out = len(energies)
    number = min(d_out, max(_SAMPLED_OUTPUTS, min(_MOST_SAMPLED // len(weight), math.ceil(_SAMPLED_PART * d_out))))
    sample = spread_outputs(energies, number)
    part = weight if number == d_out else weight[:, sample].contiguous()
    counts = stops if number == d_out else [max(1, stop * number // d_out) for stop in stops]
    paths = split_path(part, problem.prepared_gram().unit, counts)
    found = [torch.stack([pruned.errors.sum(), _energy(part - pruned.weight)]) for pruned in paths]
    *rows, wholes = torch.stack([*found, torch.stack([energies.sum(), _energy(weight)])]).tolist()
    errors = np.array(rows).reshape(-1, 2)
    if number < d_out:
        errors *= _cut(weight, problem.gram().diagonal(), stops, sample)
    shares = np.divide(errors, wholes, out=np.zeros_like(errors), where=np.array(wholes) > 0)
    relative: Float64[np.ndarray, "stops 2"] = np.minimum(np.sqrt(shares), 1.0)
    return relative


def _energy(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, ""]:
    return inner_product(matrix, matrix)


def _cut(
    weight: Float[Tensor, "d_in d_out"],
    energies: Float[Tensor, " d_in"],
    stops: Sequence[int],
    sample: Int64[Tensor, " sampled"],
) -> Float64[np.ndarray, "stops 2"]:
    """Return how many times as much is cut from all outputs as from a sample, in output and in weight.

    The entries with the least energy are cut, without correcting the others. The errors of pruning are a smaller but
    similar part of that for all outputs.
    """
    squares = weight.square()
    scores = squares * energies[:, None]
    ordered = scores.flatten()[:: max(1, weight.numel() // _ORDERED_SCORES)].sort().values
    # Sums over all outputs and over the sample, by a product.
    sums = torch.stack([torch.ones_like(weight[0]), torch.zeros_like(weight[0]).index_fill(0, sample, 1)], dim=1)
    whole = weight.shape[1] / len(sample)
    found = []
    for stop in stops:
        cut = (scores < ordered[len(ordered) - 1 - stop * (len(ordered) - 1) // weight.numel()]).to(weight.dtype)
        found += [((values * cut) @ sums).sum(dim=0, dtype=torch.float64) for values in (scores, squares)]
    parts = torch.stack(found).tolist() if found else []
    factors: Float64[np.ndarray, "stops 2"] = np.array(
        [every / own if own > 0 else whole for every, own in parts]
    ).reshape(-1, 2)
    return factors


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


def least_errors(sample: SampledOutputs, ratios: Sequence[float], itemsize: int | None) -> list[float]:
    """Return relative output errors that pruning hardly falls below, at ascending ratios; infinite if nothing is left.

    Every removed entry counts as if it were the only one, see `RoundingGram.least_removal`. On layers of SmolLM2-135M
    and of the bundled model that is 0.5 to 1.12 of what `split_path` finds, in most below 1. Few outputs suffice.

    Args:
        sample: outputs of the layer.
        ratios: compression ratios.
        itemsize: bytes of a stored number if ratios are of bytes; None if they are of parameters.
    """
    few = slice(None, None, max(1, len(sample.outputs) // _ROUGHLY_SAMPLED))
    weight = (sample.weight * sample.importance.sqrt().to(sample.weight.dtype))[:, few]
    scores = (weight.square() * sample.gram.least_removal[:, None]).flatten().sort().values
    d_in, d_out = weight.shape
    # A GPU's cumulative sum adds in no fixed order, so that runs would differ.
    found = [scores[: len(scores) - nnz].sum(dtype=torch.float64) for nnz in counts(d_in, d_out, ratios, itemsize)]
    energy = output_errors(sample.problem.gram(), weight).sum()
    *squares, energy = torch.stack([*found, energy]).tolist()
    return [relative_error(square, energy) for square in squares] + [math.inf] * (len(ratios) - len(squares))


def compress(problem: LayerProblem, nnz: int) -> CompressedLayer:
    """Prune the weight to a number of nonzeros."""
    weight = problem.scaled_weight.to(problem.precision)
    pruned = prune(weight, problem.prepared_gram().unit, nnz)
    factors = LayerFactors(dictionary=None, coefficients=problem.unscaled(pruned.weight), support=pruned.support)
    return CompressedLayer(factors=factors, errors=pruned.errors)


def errors_at(
    candidates: Sequence[Candidate], shape: tuple[int, int], ratios: Sequence[float], itemsize: int | None
) -> list[float]:
    """Return the relative output errors that candidates predict at ratios; their logarithms are interpolated.

    Args:
        candidates: candidates of a layer of one kind, at least one.
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
