"""Low-rank candidates whose factors are integer codes."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from rocket_core.candidates import Candidate
from rocket_core.layers import LayerFactors
from rocket_core.linalg.factor_rounding import RoundedFactors, round_factors
from rocket_core.linalg.least_squares import output_errors
from rocket_core.linalg.rounding import RoundingGram
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, relative_error
from rocket_core.methods.sampled_outputs import output_importance, squared_norm
from rocket_core.methods.sparse import errors_at
from rocket_core.sizes import budget
from rocket_core.sizes.code_format import FACTOR_CODES, CodeFormat, factor_ranks

# Squared errors are raised by this, so that one table serves all kinds of codes: compression lowers those of few atoms
# by an eighth, of codes of the weight by a third (tiny-llama). Without it the knapsack takes too many such layers.
ALLOWANCE = 1.25


def profile(problem: LayerProblem, gram: RoundingGram, codes: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates of `factor_ranks`, by falling bytes, before the first that codes of the weight beat.

    Larger ranks lose by more: what rounding the factors adds to the error does not fall with the rank. Errors are those
    of GPTQ alone, as for other codes, with an allowance for what compression gains less. Nothing is rounded where the
    factors lose as they are.

    Args:
        problem: the layer.
        gram: its Gram matrix, prepared for rounding.
        codes: candidates of the weight's own codes, at least one.
    """
    ranks = factor_ranks(*problem.shape)
    if not ranks:
        return []
    importance, weight = output_importance(problem), problem.weight.to(problem.precision)
    sums = torch.stack([problem.output_energies().sum(), squared_norm(weight, importance)])
    # Then the energy that each rank keeps before its factors are rounded; a GPU is waited for once.
    numbers = torch.cat([sums, problem.rough_basis().singular_values.double().square()]).tolist()
    energies, kept = numbers[:2], list(accumulate(numbers[2:]))
    fewest = min(candidate.stored_bytes for candidate in codes)
    found: list[Candidate] = []
    for rank in reversed(ranks):
        size = FACTOR_CODES.low_rank_bytes(*problem.shape, rank)
        [competing] = errors_at(codes, problem.shape, [1 - size / weight.numel()], 1)
        most = competing if size >= fewest else math.inf
        if relative_error(ALLOWANCE * (energies[0] - kept[rank - 1]), energies[0]) > most:
            break
        removed = weight - _rounded(problem, gram, rank, FACTOR_CODES, improved=False).weight(problem.precision)
        own = (output_errors(problem.gram(), removed) * importance).sum()
        candidate = _candidate(problem, rank, torch.stack([own, squared_norm(removed, importance)]).tolist(), energies)
        if candidate.reconstruction_error > most:
            break
        found.insert(0, candidate)
    return found


def compress(problem: LayerProblem, rank: int, code_format: CodeFormat) -> CompressedLayer:
    """Factorize and round the weight.

    Args:
        problem: the layer.
        rank: number of atoms.
        code_format: how to store both factors.
    """
    rounded = _rounded(problem, problem.prepared_gram().rounding, rank, code_format, improved=True)
    removed = problem.weight.to(problem.precision) - rounded.weight(problem.precision)
    factors = LayerFactors(
        dictionary=rounded.dictionary.weight(problem.precision),
        coefficients=rounded.coefficients.weight(problem.precision),
        value_codes=(rounded.coefficients.stored(),),
        dictionary_codes=rounded.dictionary.stored(),
    )
    return CompressedLayer(factors=factors, errors=output_errors(problem.gram(), removed) * output_importance(problem))


def _rounded(
    problem: LayerProblem, gram: RoundingGram, rank: int, code_format: CodeFormat, *, improved: bool
) -> RoundedFactors:
    rows = problem.rough_basis().directions[:, :rank].mT
    return round_factors(
        problem.weight.to(problem.precision),
        gram,
        output_importance(problem),
        problem.unscaled(rows).to(problem.precision),
        code_format,
        improved=improved,
    )


def _candidate(problem: LayerProblem, rank: int, squares: Sequence[float], energies: Sequence[float]) -> Candidate:
    """Return a candidate, given the squared errors of outputs and weight, and the squared norms of both."""
    d_in, d_out = problem.shape
    error = ALLOWANCE * squares[0]
    return Candidate(
        kind="low_rank",
        rank=rank,
        nnz=rank * d_out,
        bits=FACTOR_CODES.bits,
        group_size=FACTOR_CODES.group_size,
        scale_bits=FACTOR_CODES.scale_bits,
        kept_parameters=budget.kept_parameters(d_in, rank, rank * d_out),
        stored_bytes=FACTOR_CODES.low_rank_bytes(d_in, d_out, rank),
        reconstruction_error=relative_error(error, energies[0]),
        weight_error=relative_error(squares[1], energies[1]),
        loss=problem.predicted_loss_increase(error),
    )
