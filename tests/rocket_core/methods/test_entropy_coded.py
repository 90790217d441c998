"""Entropy-coded candidates and layers, compared with the explicit weight and with the written tensors."""

import itertools

import pytest
import torch

from rocket_core.config import CompressionConfig
from rocket_core.layers import approximation, layer_tensors
from rocket_core.methods import entropy_coded, method_for
from rocket_core.methods.sampled_outputs import SampledOutputs
from rocket_core.sizes.code_format import fewest_bytes, fewest_coded_bytes
from tests.reference.problems import example
from tests.sampling import sweep


def rocket(**settings):
    base = {"ratio": 0.4, "objective": "whitened", "budget": "bytes", "kinds": ("entropy_coded",)}
    return method_for(CompressionConfig(**{**base, **settings}), 2)


def coded_size(factors):
    return sum(tensor.nbytes for tensor in layer_tensors(factors, torch.float16).values())


@pytest.mark.parametrize(
    ("shape", "weights"),
    sweep([((60, 80), 2), ((24, 200), None)], soak=[((96, 128), None), ((96, 128), 2), ((150, 60), 2)]),
)
def test_layers_fill_their_bytes_with_less_error(shape, weights):
    layer = example(shape[0], shape[1:], weights=weights)
    method = rocket()
    candidates = method.profile(layer.problem)
    assert len(candidates) >= 8
    assert candidates[-1].stored_bytes < fewest_bytes(*shape)
    for candidate in candidates:
        assert fewest_coded_bytes(*shape) <= candidate.stored_bytes < shape[0] * shape[1]
        assert (candidate.kind, candidate.bits, candidate.nnz) == ("entropy_coded", None, None)
        assert (candidate.loss is None) == (weights is None)
        compressed = method.compress(layer.problem, candidate)
        # Layers this small change by some bytes at once.
        assert 0.98 * candidate.stored_bytes - 8 <= coded_size(compressed.factors) <= candidate.stored_bytes
        error, relative, _, _ = layer.errors(approximation(compressed.factors, torch.float64))
        assert float(compressed.errors.sum()) == pytest.approx(error, rel=1e-6)
        assert relative <= 1.03 * candidate.reconstruction_error


def test_more_bytes_leave_less_error():
    layer = example(96, (128,), weights=1)
    candidates = entropy_coded.profile(layer.problem, SampledOutputs.of(layer.problem))
    for larger, smaller in itertools.pairwise(candidates):
        assert larger.stored_bytes > smaller.stored_bytes
        assert larger.loss < smaller.loss
        assert larger.weight_error < smaller.weight_error


def test_at_equal_bytes_they_beat_codes_of_fixed_length():
    layer = example(80, (120,), weights=1)
    method = rocket(kinds=("quantized",))
    fixed = method.profile(layer.problem)
    for candidate in fixed:
        if candidate.bits in (3, 4):
            compressed = entropy_coded.compress(layer.problem, candidate.stored_bytes)
            coded, _, _, _ = layer.errors(approximation(compressed.factors, torch.float64))
            plain, _, _, _ = layer.errors(
                approximation(method.compress(layer.problem, candidate).factors, torch.float64)
            )
            assert coded < 0.9 * plain


def test_any_number_of_bytes_is_met_almost_exactly():
    layer = example(96, (400,))
    for size in range(12_000, 30_000, 4_567):
        written = coded_size(entropy_coded.compress(layer.problem, size).factors)
        assert 0.995 * size <= written <= size


def test_a_wide_layer_is_profiled_on_a_sample():
    layer = example(24, (4000,), weights=1)
    for candidate in rocket().profile(layer.problem)[2:-2]:
        compressed = entropy_coded.compress(layer.problem, candidate.stored_bytes)
        _, relative, _, _ = layer.errors(approximation(compressed.factors, torch.float64))
        assert 0.7 * candidate.reconstruction_error <= relative <= 1.05 * candidate.reconstruction_error


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2)])
def test_tiny_layers_have_candidates_within_dense_bytes(shape):
    layer = example(shape[0], shape[1:])
    for candidate in rocket().profile(layer.problem):
        assert coded_size(rocket().compress(layer.problem, candidate).factors) <= candidate.stored_bytes


def test_a_weight_of_zeros_and_one_with_an_outlier_are_coded():
    layer = example(64, (100,))
    layer.problem.weight.zero_()
    [*_, smallest] = rocket().profile(layer.problem)
    assert smallest.reconstruction_error == 0
    factors = rocket().compress(layer.problem, smallest).factors
    assert not bool(factors.codes.any())

    layer = example(64, (100,), seed=1)
    layer.problem.weight[3, 5] = 1e4
    compressed = entropy_coded.compress(layer.problem, 3000)
    assert coded_size(compressed.factors) <= 3000
    assert bool(compressed.errors.isfinite().all())


@pytest.mark.parametrize(
    "settings", [{"budget": "parameters"}, {"storage": "memory"}, {"kinds": ("quantized", "sparse")}]
)
def test_other_settings_offer_none(settings):
    layer = example(24, (12,))
    base = {"kinds": ("sparse", "entropy_coded")}
    assert "entropy_coded" not in {candidate.kind for candidate in rocket(**base | settings).profile(layer.problem)}
