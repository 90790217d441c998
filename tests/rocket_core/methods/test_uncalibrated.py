"""Rounding by the weights alone."""

import pytest
import torch

from rocket_core.config import CompressionConfig
from rocket_core.layers import layer_tensors
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem, entropy_coded, method_for, quantized
from rocket_core.methods.sampled_outputs import SampledOutputs

SHAPE = 96, 24


def problem(gram=None):
    """Return a problem with few outputs, so that all are in the sample, whose norms differ."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*SHAPE, generator=generator) * torch.linspace(0.01, 2, SHAPE[1])
    energy = torch.empty(0) if gram is None else gram.diagonal()
    statistics = GramStatistics(tokens=1, gram=gram, output_gram=None, input_energy=energy)
    weights = weight.double().square().sum(dim=0).rsqrt()
    return LayerProblem(
        weight=weight, statistics=statistics, shrinkage=0.0, precision=torch.float32, output_weights=weights
    )


def method():
    return method_for(CompressionConfig(preset="instant", ratio=0.7), 2)


def test_predicted_errors_are_those_of_the_rounded_weight():
    layer = problem()
    candidates = method().profile(layer)
    assert {candidate.kind for candidate in candidates} == {"quantized", "entropy_coded"}
    for candidate in candidates:
        result = method().compress(layer, candidate)
        assert isinstance(result.factors, RoundedWeight)
        removed = layer.weight.double() - result.factors.weight(torch.float64)
        relative = removed.square().sum(dim=0) / layer.weight.double().square().sum(dim=0)
        assert torch.allclose(result.errors, relative, rtol=1e-4)
        assert candidate.weight_error == pytest.approx(candidate.reconstruction_error)
        assert candidate.loss == pytest.approx(SHAPE[1] * candidate.reconstruction_error**2 / 2)
        if candidate.kind == "quantized":
            assert float(relative.mean()) == pytest.approx(candidate.reconstruction_error**2, rel=1e-4)


def test_errors_are_those_under_an_identity_for_a_gram_matrix():
    formats = quantized.formats_for(SHAPE[0])[::5]
    alone = problem()
    with_gram = problem(torch.eye(SHAPE[0]))
    for own, other in zip(
        *(quantized.profile(layer, SampledOutputs.of(layer), formats) for layer in (alone, with_gram)), strict=True
    ):
        assert own.loss == pytest.approx(other.loss, rel=1e-3)


@pytest.mark.parametrize("part", [0.15, 0.35, 0.6])
def test_a_coded_layer_fills_its_bytes(part):
    layer = problem()
    most = int(part * layer.weight.numel())
    result = entropy_coded.compress(layer, most)
    taken = sum(tensor.nbytes for tensor in layer_tensors(result.factors, torch.float16).values())
    # Streams of so small a layer change by some bytes at once.
    assert 0.98 * most - 8 <= taken <= most


def test_every_output_has_the_same_relative_error():
    layer = problem()
    result = entropy_coded.compress(layer, layer.weight.numel() // 2)
    assert float(result.errors.max() / result.errors.min()) < 2


def test_more_bits_leave_less_error():
    coded = [candidate for candidate in method().profile(problem()) if candidate.kind == "entropy_coded"]
    assert len(coded) >= 8
    sizes, losses = ([getattr(one, name) for one in coded] for name in ("stored_bytes", "loss"))
    assert sizes == sorted(sizes, reverse=True)
    assert losses == sorted(losses)
