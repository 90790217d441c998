"""Quantized candidates, compared with the explicit weight and with the written tensors."""

import itertools

import pytest
import torch

from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import CompressionConfig
from rocket_core.layers import approximation, layer_tensors
from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.rounding import RoundingGram, gptq
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem, method_for, quantized, sampled_outputs
from rocket_core.methods.sampled_outputs import SampledOutputs
from rocket_core.sizes.code_format import CODE_BITS, fewest_bytes, formats_for
from tests.reference.allocations import allocate
from tests.reference.problems import TOKENS, example
from tests.sampling import sweep

SHAPES = [(24, 24), (36, 12), (150, 20)]


def rocket(**settings):
    base = {"ratio": 0.4, "objective": "whitened", "budget": "bytes", "kinds": ("quantized",)}
    return method_for(CompressionConfig(**{**base, **settings}), 2)


def profile_of(layer):
    return quantized.profile(layer.problem, SampledOutputs.of(layer.problem), formats_for(layer.problem.shape[0]))


@pytest.mark.parametrize("weights", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_have_the_errors_of_gptq(shape, weights):
    layer = example(shape[0], shape[1:], weights=weights)
    found = profile_of(layer)
    assert {(c.bits, c.group_size, c.scale_bits) for c in found} == {
        (f.bits, f.group_size, f.scale_bits) for f in formats_for(shape[0])
    }
    gram = RoundingGram.of(layer.problem.gram())
    for candidate in found:
        scales = search_scales(layer.problem.weight, gram.matrix.diagonal(), candidate.code_format)
        rounded = gptq(layer.problem.weight, gram, scales).weight(torch.float64)
        _, relative, distance, loss = layer.errors(rounded)
        assert candidate.reconstruction_error == pytest.approx(relative, rel=1e-6)
        assert candidate.weight_error == pytest.approx(distance, rel=1e-6)
        assert (candidate.loss is None) == (weights is None)
        assert loss is None or candidate.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "sequential"),
    sweep(
        [(SHAPES[0], True), (SHAPES[1], False)],
        soak=[(SHAPES[0], False), (SHAPES[1], True), (SHAPES[2], False), (SHAPES[2], True)],
    ),
)
def test_compression_has_the_stated_size_and_less_error(shape, sequential):
    layer = example(shape[0], shape[1:], weights=1)
    method = rocket(sequential=sequential)
    for candidate in method.profile(layer.problem):
        compressed = method.compress(layer.problem, candidate)
        tensors = layer_tensors(compressed.factors, torch.float16)
        assert sum(tensor.nbytes for tensor in tensors.values()) == candidate.stored_bytes
        error, relative, _, _ = layer.errors(approximation(compressed.factors, torch.float64))
        assert float(compressed.errors.sum()) == pytest.approx(error, rel=1e-6)
        # GPTQ minimises the error with a damped Gram matrix.
        assert relative <= 1.02 * candidate.reconstruction_error


def test_candidates_of_a_wide_layer_are_those_of_a_sample():
    layer = example(24, (4000,), weights=1)
    gram = RoundingGram.of(layer.problem.gram())
    for candidate in profile_of(layer):
        scales = search_scales(layer.problem.weight, gram.matrix.diagonal(), candidate.code_format)
        _, relative, distance, loss = layer.errors(gptq(layer.problem.weight, gram, scales).weight(torch.float64))
        assert candidate.reconstruction_error == pytest.approx(relative, rel=0.1)
        assert candidate.weight_error == pytest.approx(distance, rel=0.1)
        assert candidate.loss == pytest.approx(loss, rel=0.2)


@pytest.mark.parametrize("settings", [{"budget": "parameters"}, {"kinds": ("sparse",)}])
def test_other_settings_offer_no_quantized_candidates(settings):
    layer = example(24, (12,))
    offered = {
        candidate.kind for candidate in rocket(**{"kinds": ("sparse", "quantized"), **settings}).profile(layer.problem)
    }
    assert offered == {"sparse"}


def test_a_target_size_quantizes_unless_the_preset_does_not():
    assert CompressionConfig(target_bytes=10**6).quantizes
    assert not CompressionConfig(ratio=0.3).quantizes
    assert not CompressionConfig(target_bytes=10**6, preset="paper").quantizes


def test_beside_entropy_coded_layers_there_are_few_formats():
    layer = example(64, (48,))
    found = rocket(kinds=("quantized", "entropy_coded")).profile(layer.problem)
    fixed = [candidate for candidate in found if candidate.kind == "quantized"]
    of_8_bits = {code_format for code_format in formats_for(64) if code_format.bits == 8}
    others = {candidate.code_format for candidate in fixed} - of_8_bits
    assert len(fixed) == len(of_8_bits) + len(others)
    assert {code_format.stored_bytes(64, 48) for code_format in others} == {fewest_bytes(64, 48)}


@pytest.mark.parametrize("d_in", [1, 7, 16, 64, 100, 4096])
def test_formats_differ_and_the_smallest_is_known(d_in):
    formats = formats_for(d_in)
    assert len(set(formats)) == len(formats)
    assert {layer.bits for layer in formats} == set(CODE_BITS)
    assert all(layer.group_size <= d_in for layer in formats)
    assert fewest_bytes(d_in, 48) == min(layer.stored_bytes(d_in, 48) for layer in formats)


def profiles(number):
    for index in range(number):
        layer = example(64, (24 + 8 * index,), seed=index, weights=1, spread=index / 2)
        dense = Candidate(
            kind="dense",
            kept_parameters=layer.problem.weight.numel(),
            stored_bytes=2 * layer.problem.weight.numel(),
            reconstruction_error=0,
            weight_error=0,
            loss=0,
        )
        yield LayerProfile(
            name=f"layers.{index}.proj",
            d_in=64,
            d_out=24 + 8 * index,
            input_group=f"layers.{index}.proj",
            tokens=TOKENS,
            candidates=(dense, *profile_of(layer)),
        )


def test_an_allocation_is_never_worse_than_uniform_bits():
    layers = list(profiles(5))
    whole = sum(2 * layer.parameters for layer in layers)
    for layer_format in formats_for(64):
        uniform = [
            next(c for c in layer.candidates if c.kind == "quantized" and c.code_format == layer_format)
            for layer in layers
        ]
        ratio = 1 - sum(c.stored_bytes for c in uniform) / whole
        found = allocate(layers, ratio - 1e-12, objective="fisher", cap_slack=0.01, budget_unit="bytes", itemsize=2)
        assert found.kept <= found.budget
        assert found.total_error <= sum(c.loss for c in uniform) * (1 + 1e-9)


def test_more_bytes_leave_less_error():
    layer = example(64, (48,), weights=1)
    by_group = {}
    for candidate in profile_of(layer):
        by_group.setdefault(candidate.group_size, []).append(candidate)
    for candidates in by_group.values():
        for larger, smaller in itertools.pairwise(candidates):
            assert larger.stored_bytes > smaller.stored_bytes
            assert larger.loss < smaller.loss


def test_outputs_in_parts_give_the_codes_of_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 24, generator=generator, dtype=torch.float64)
    weight = torch.randn(24, 40, generator=generator, dtype=torch.float64) * torch.rand(40, generator=generator)
    gram = rows.T @ rows
    statistics = GramStatistics(tokens=200, gram=gram, output_gram=None, input_energy=gram.diagonal())
    for code_format in formats_for(24)[::4]:
        results = []
        for outputs in (2**14, 7):
            monkeypatch.setattr(sampled_outputs, "OUTPUTS_AT_ONCE", outputs)
            problem = LayerProblem(weight=weight, statistics=statistics, shrinkage=0.0, precision=torch.float64)
            results.append(quantized.compress(problem, code_format, splitting=True))
        whole, parts = results
        assert torch.equal(whole.factors.weight(torch.float64), parts.factors.weight(torch.float64))
        torch.testing.assert_close(whole.errors, parts.errors, rtol=1e-9, atol=0)


# Massive activations come from few outputs, whose weights have a few large entries.
@pytest.mark.parametrize("massive", [0, 1, 3])
@pytest.mark.parametrize("uncalibrated", [False, True])
def test_a_sample_predicts_what_few_massive_outputs_lose(massive, uncalibrated):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(32, 300, generator=generator, dtype=torch.float64)
    weight[::9, 37 : 37 + massive] *= 100
    gram = None if uncalibrated else rows.T @ rows
    statistics = GramStatistics(tokens=400, gram=gram, output_gram=None, input_energy=torch.ones(32))
    problem = LayerProblem(weight=weight, statistics=statistics, shrinkage=0.0, precision=torch.float64)
    assert problem.is_uncalibrated == uncalibrated

    sample = SampledOutputs.of(problem)
    assert len(sample.outputs) < 300
    for candidate in quantized.profile(problem, sample, formats_for(32)[::4]):
        whole = quantized.compress(problem, candidate.code_format, splitting=False)
        squares = candidate.reconstruction_error**2 * float(problem.output_energies().sum())
        assert squares == pytest.approx(float(whole.errors.sum()), rel=0.25)
