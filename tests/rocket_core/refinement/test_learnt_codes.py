"""Learning of integer codes."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from rocket_core.layers.code_stream import encode_codes
from rocket_core.linalg.entropy_rounding import StepScales, round_each
from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.refinement import LearntCodes
from rocket_core.refinement.learnt_codes import shorten
from rocket_core.sizes.code_format import CodeFormat, coded_format

D_IN, D_OUT = 48, 40


def weight_of(seed=0):
    return torch.randn(D_IN, D_OUT, generator=torch.Generator().manual_seed(seed))


def fixed(bits=3, seed=0):
    """Return a layer of fixed length, and the weight that it rounds."""
    weight = weight_of(seed)
    code_format = CodeFormat(bits=bits, group_size=16, scale_bits=6)
    rounded = round_to_nearest(weight, search_scales(weight, torch.ones(D_IN), code_format))
    return LearntCodes(rounded, weight.T, None), rounded, weight


def coded(seed=0, step=0.7):
    """Return an entropy-coded layer, and the weight that it rounds."""
    weight = weight_of(seed)
    rounded = round_each(weight, StepScales.of(weight, torch.full((D_OUT,), step)).at(1.0))
    assert rounded.scales.format == coded_format(D_IN)
    return LearntCodes(rounded, weight.T, None), rounded, weight


@pytest.mark.parametrize("make", [fixed, coded])
def test_it_starts_with_the_codes_it_was_given(make):
    layer, rounded, _ = make()
    assert torch.equal(layer.rounded().codes, rounded.codes)
    inputs = torch.randn(6, D_IN, generator=torch.Generator().manual_seed(1))
    expected = functional.linear(inputs, rounded.rows(torch.float32))
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-5)


def test_it_starts_with_the_codes_even_if_others_are_nearer():
    _, rounded, weight = fixed()
    other = replace(rounded, codes=rounded.codes.flip(0))
    assert torch.equal(LearntCodes(other, weight.T, None).rounded().codes, other.codes)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_codes_stay_in_range(bits):
    layer, _, _ = fixed(bits)
    with torch.no_grad():
        layer.position.mul_(1000)
    codes = layer.rounded().codes
    assert codes.min() == -(2 ** (bits - 1))
    assert codes.max() == 2 ** (bits - 1) - 1


def test_gradients_are_those_of_the_weight_in_units_of_the_scale():
    layer, rounded, _ = fixed()
    inputs = torch.randn(6, D_IN, generator=torch.Generator().manual_seed(1))
    layer(inputs).square().sum().backward()
    weight = rounded.rows(torch.float64).requires_grad_()
    functional.linear(inputs.double(), weight).square().sum().backward()
    scales = rounded.scales.by_input(D_IN, torch.float64).T
    torch.testing.assert_close(layer.position.grad.double(), weight.grad * scales, rtol=1e-4, atol=1e-4)


def test_bits_are_the_entropy_of_the_codes():
    layer, rounded, _ = coded()
    values, counts = torch.unique(rounded.codes, return_counts=True)
    entropy = -(counts * (counts / counts.sum()).double().log2()).sum()
    assert len(values) > 3
    assert float(layer.bits().detach()) == pytest.approx(float(entropy), rel=0.02)


def test_the_gradient_of_bits_is_the_difference_of_the_lengths():
    layer, _, _ = coded()
    layer.bits().backward()
    codes = layer.rounded().codes
    counts = torch.bincount(codes.flatten().long() + 127, minlength=255) + 0.02
    lengths = -(counts / counts.sum()).double().log2()
    below = layer.position.detach().floor().long() + 127
    expected = lengths[below + 1] - lengths[below]
    torch.testing.assert_close(layer.position.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_codes_of_fixed_length_are_never_shortened():
    layer, _, _ = fixed()
    with torch.no_grad():
        layer.position.mul_(3)
    shorten([layer])
    assert layer.shortened is None
    assert layer.coded_bytes() == 0


def test_shortened_layers_take_no_more_bytes_together():
    layers = [coded(seed)[0] for seed in range(3)]
    with torch.no_grad():
        for layer, factor in zip(layers, (1.3, 1.1, 0.9), strict=True):
            layer.position.mul_(factor)
    before = [layer.rounded().codes for layer in layers]
    sizes = [encode_codes(codes.T.reshape(-1)).numel() for codes in before]
    most = sum(layer.coded_bytes_before for layer in layers)
    assert sum(sizes) > most
    shorten(layers)
    after = [layer.rounded().codes for layer in layers]
    assert sum(encode_codes(codes.T.reshape(-1)).numel() for codes in after) <= most
    for old, new in zip(before, after, strict=True):
        moved = new != old
        assert torch.equal(new[moved].abs().int(), old[moved].abs().int() - 1)
    # No more of them than needed, up to the precision of the search.
    assert sum(int((old != new).sum()) for old, new in zip(before, after, strict=True)) < 0.5 * 3 * D_IN * D_OUT


def test_those_nearest_to_a_shorter_code_are_shortened():
    layer, _, _ = coded()
    with torch.no_grad():
        layer.position.mul_(1.05)
    shorten([layer])
    assert layer.shortened is not None
    distances = layer.distances()
    assert distances[layer.shortened].max() <= distances[~layer.shortened].min()


def test_layers_within_their_bytes_are_left_alone():
    layer, _, _ = coded()
    with torch.no_grad():
        layer.position.mul_(0.5)
    shorten([layer])
    assert layer.shortened is None
