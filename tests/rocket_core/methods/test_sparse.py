"""Predictions of a profile for pruned weights, and the results of compression."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rocket_core.candidates import Candidate
from rocket_core.config import CompressionConfig
from rocket_core.linalg.least_squares import UnitGram
from rocket_core.linalg.pruning import split_path
from rocket_core.methods import method_for
from rocket_core.methods.sampled_outputs import SampledOutputs
from rocket_core.methods.sparse import SPARSE_RATIOS, errors_at, least_errors
from tests.reference import pruning
from tests.reference.problems import TOKENS, example

MEASURED = (0.1, 0.35, 0.6, 0.8, 0.95)


def method(**settings):
    return method_for(CompressionConfig(ratio=0.4, objective="whitened", kinds=("sparse",), **settings), 4)


def profiled(layer, **settings):
    """By nonzeros."""
    return {candidate.nnz: candidate for candidate in method(**settings).profile(layer.problem)}


def nonzeros(layer, ratio):
    return math.floor(layer.problem.weight.numel() * (1 - ratio) + 1e-9)


def pruned_in_turn(layer, ratios):
    """Return error, relative error and relative distance of weights pruned to these ratios in turn."""
    problem = layer.problem
    scale = 1 if problem.output_weights is None else problem.output_weights
    way = split_path(problem.scaled_weight, UnitGram.of(problem.gram()), [nonzeros(layer, ratio) for ratio in ratios])
    return [layer.errors(pruned.weight / scale)[:3] for pruned in way]


@pytest.mark.parametrize("weights", [None, 2])
def test_profile_errors_are_measured_or_interpolated(weights):
    layer = example(40, (36,), weights=weights)
    found = profiled(layer)
    assert [nonzeros(layer, ratio) for ratio in SPARSE_RATIOS] == list(found)
    measured = pruned_in_turn(layer, MEASURED)
    for ratio, (error, relative, distance) in zip(MEASURED, measured, strict=True):
        candidate = found[nonzeros(layer, ratio)]
        assert candidate.reconstruction_error == pytest.approx(relative, rel=1e-6)
        assert candidate.weight_error == pytest.approx(distance, rel=1e-6)
        assert candidate.loss == (None if weights is None else pytest.approx(error / (2 * TOKENS), rel=1e-6))
    exact = {ratio: 1 - nonzeros(layer, ratio) / layer.problem.weight.numel() for ratio in SPARSE_RATIOS}
    for between, before, after in ((0.05, 0.1, 0.35), (0.3, 0.1, 0.35), (0.5, 0.35, 0.6), (0.9, 0.8, 0.95)):
        errors = [measured[MEASURED.index(ratio)][1] for ratio in (before, after)]
        power = math.log(errors[1] / errors[0]) / math.log(exact[after] / exact[before])
        expected = errors[0] * (exact[between] / exact[before]) ** power
        assert found[nonzeros(layer, between)].reconstruction_error == pytest.approx(expected, rel=1e-6)


def test_errors_of_wide_layers_are_estimated_from_some_outputs():
    layer = example(48, (300,), weights=2)
    found = profiled(layer)
    measured = pruned_in_turn(layer, MEASURED)
    for ratio, (_, relative, distance) in zip(MEASURED, measured, strict=True):
        candidate = found[nonzeros(layer, ratio)]
        tolerance = 0.03
        assert candidate.reconstruction_error == pytest.approx(relative, rel=tolerance)
        assert candidate.weight_error == pytest.approx(distance, rel=2 * tolerance)


@pytest.mark.parametrize("weights", [None, 2])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_compression_ends_slightly_below_the_predicted_error(weights, precision):
    layer = example(96, (96,), weights=weights, precision=precision)
    found = profiled(layer)
    for ratio in (0.2, 0.35, 0.5, 0.65, 0.8):
        candidate = found[nonzeros(layer, ratio)]
        factors = method().compress(layer.problem, candidate).factors
        achieved = layer.errors(factors.coefficients)[1]
        assert 0.7 < achieved / candidate.reconstruction_error < 1.001


@pytest.mark.parametrize("weights", [None, 2])
def test_a_sparse_layer_is_the_least_squares_of_its_support(weights):
    layer = example(24, (24,), weights=weights)
    for candidate in profiled(layer).values():
        factors = method().compress(layer.problem, candidate).factors
        best = pruning.least_squares(layer.inputs, layer.problem.weight, factors.support)
        assert layer.errors(factors.coefficients)[0] == pytest.approx(layer.errors(best)[0], rel=1e-2, abs=1e-12)


@pytest.mark.parametrize("budget", ["parameters", "bytes"])
def test_interpolated_errors_are_between_their_candidates(budget):
    layer = example(40, (36,))
    candidates = list(profiled(layer, budget=budget).values())
    itemsize = 4 if budget == "bytes" else None
    size = 40 * 36 * (itemsize or 1)
    costs = [it.kept_parameters if itemsize is None else it.stored_bytes for it in candidates]
    at = [1 - cost / size for cost in costs]
    errors = [candidate.reconstruction_error for candidate in candidates]
    np.testing.assert_allclose(errors_at(candidates, (40, 36), at, itemsize), errors)
    between = errors_at(candidates, (40, 36), [sum(pair) / 2 for pair in itertools.pairwise(at)], itemsize)
    for error, (least, most) in zip(between, itertools.pairwise(errors), strict=True):
        assert least < error < most


def test_zero_errors_are_interpolated_as_zero():
    free = Candidate(kind="sparse", nnz=5, kept_parameters=5, stored_bytes=30, reconstruction_error=0, weight_error=0)
    assert errors_at([free], (4, 4), [0.3, 0.6], None) == pytest.approx([0, 0], abs=1e-300)


@pytest.mark.parametrize("weights", [None, 2])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_pruning_hardly_falls_below_the_least_errors(weights, spread):
    layer = example(40, (36,), weights=weights, spread=spread)
    least = least_errors(SampledOutputs.of(layer.problem), MEASURED, None)
    found = [relative for _, relative, _ in pruned_in_turn(layer, MEASURED)]
    for lower, error in zip(least, found, strict=True):
        assert 0.2 * error < lower < 1.05 * error


def test_the_least_errors_of_uncorrelated_inputs_are_exact():
    layer = example(24, (10,))
    problem = replace(
        layer.problem, statistics=replace(layer.problem.statistics, gram=torch.linspace(1, 9, 24).diag().double())
    )
    scores = (problem.weight.square() * problem.gram().diagonal()[:, None]).flatten().sort().values
    expected = [math.sqrt(scores[: math.floor(240 * ratio)].sum() / scores.sum()) for ratio in (0.2, 0.5)]
    found = least_errors(SampledOutputs.of(problem), (0.2, 0.5, 0.9999), None)
    assert found[:2] == pytest.approx(expected, rel=1e-5)
    assert found[2] == math.inf
