import itertools

import numpy as np
import pytest
import torch

from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.rounding import (
    RoundingGram,
    gptq,
    gptq_and_errors,
    improve,
    refit_scales,
    round_to_nearest,
    round_weight,
    split,
)
from rocket_core.sizes.code_format import CodeFormat
from tests.reference import rounding as reference

BITS = (2, 3, 4, 5, 6, 7, 8)


def random_layer(d_in, d_out, *, seed=0, spread=1.0, dtype=torch.float64):
    """Return a weight and a Gram matrix of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * d_in, d_in, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(d_in, d_in, generator=generator, dtype=torch.float64)).Q
    inputs = inputs * torch.logspace(0, -spread, d_in, dtype=torch.float64) @ rotation
    weight = torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)
    return weight.to(dtype), RoundingGram.of((inputs.T @ inputs).to(dtype))


def scales_of(weight, gram, bits, *, group_size=8, scale_bits=6):
    layer = CodeFormat(bits=bits, group_size=group_size, scale_bits=scale_bits)
    return search_scales(weight, gram.matrix.diagonal(), layer)


def error(weight, gram, rounded):
    return float(reference.output_error(gram.matrix, weight, rounded.weight(weight.dtype)).sum())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("d_in", "d_out", "group_size"), [(1, 3, 4), (20, 4, 6), (70, 2, 16)])
def test_gptq_refits_what_remains_after_each_input(d_in, d_out, group_size, bits):
    weight, gram = random_layer(d_in, d_out, seed=bits)
    scales = scales_of(weight, gram, bits, group_size=group_size)
    steps = scales.by_input(d_in, torch.float64)
    expected = reference.round_in_order(gram.matrix, weight, steps, gram.order.tolist(), bits)
    assert np.array_equal(gptq(weight, gram, scales).codes.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", BITS)
def test_gptq_knows_its_errors_with_and_without_damping(bits, dtype):
    weight, gram = random_layer(150, 5, dtype=dtype)
    silent = gram.matrix.clone()
    # Neither input fires.
    silent[[3, 100]] = 0
    silent[:, [3, 100]] = 0
    damped = RoundingGram.of(silent)
    rounded, errors = gptq_and_errors(weight, damped, scales_of(weight, damped, bits))
    removed = (weight - rounded.weight(dtype)).double()
    close = {"rtol": 1e-9 if dtype == torch.float64 else 1e-4, "atol": 0}
    torch.testing.assert_close(errors, (removed * (damped.matrix.double() @ removed)).sum(dim=0), **close)
    exact = (removed * (silent.double() @ removed)).sum(dim=0)
    torch.testing.assert_close(damped.undamped(errors, removed.to(dtype)), exact, **close)


def test_inputs_are_rounded_by_falling_energy():
    _, gram = random_layer(12, 1)
    energies = gram.matrix.diagonal()[gram.order]
    assert bool((energies[:-1] >= energies[1:]).all())


def test_the_factor_is_that_of_the_inverse():
    _, gram = random_layer(12, 1)
    ordered = gram.matrix[gram.order][:, gram.order]
    torch.testing.assert_close(gram.factor.T @ gram.factor, torch.linalg.inv(ordered))
    assert torch.equal(gram.factor, gram.factor.triu())


@pytest.mark.parametrize("bits", BITS)
def test_each_algorithm_reduces_the_error(bits):
    weight, gram = random_layer(96, 24)
    scales = scales_of(weight, gram, bits)
    nearest = error(weight, gram, round_to_nearest(weight, scales))
    rounded = gptq(weight, gram, scales)
    by_gptq = error(weight, gram, rounded)
    separated, errors = split(weight, gram, scales)
    by_splitting = error(weight, gram, separated)
    assert float(errors.sum()) == pytest.approx(by_splitting)
    improved = error(weight, gram, improve(weight, gram, rounded))
    assert by_gptq < nearest
    assert by_splitting < nearest
    assert improved < by_gptq
    best = error(weight, gram, round_weight(weight, gram, scales.format)[0])
    assert best < min(by_splitting, improved)
    assert best <= error(weight, gram, round_weight(weight, gram, scales.format, splitting=False)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("splitting", [False, True])
def test_rounding_tells_its_errors(splitting, dtype):
    weight, gram = random_layer(150, 12, dtype=dtype)
    layer = CodeFormat(bits=3, group_size=16, scale_bits=8)
    rounded, errors = round_weight(weight, gram, layer, splitting=splitting)
    exact = reference.output_error(gram.matrix.double(), weight.double(), rounded.weight(dtype).double())
    torch.testing.assert_close(errors, torch.as_tensor(exact), rtol=1e-9 if dtype == torch.float64 else 1e-4, atol=0)


@pytest.mark.parametrize("d_in", [520, 1000])
def test_wide_layers_are_rounded_as_well_by_rough_products(d_in):
    weight, gram = random_layer(d_in, 16, dtype=torch.float32)
    scales = scales_of(weight, gram, 3, group_size=8)
    exact = gptq(weight.double(), RoundingGram.of(gram.matrix.double(), damping=0.0), scales)
    rounded, errors = gptq_and_errors(weight, gram, scales)
    assert error(weight, gram, rounded) == pytest.approx(error(weight, gram, exact), rel=0.01)
    assert float(errors.sum()) == pytest.approx(error(weight, gram, rounded), rel=1e-3)


def test_more_bits_leave_less_error():
    weight, gram = random_layer(64, 16)
    errors = [
        error(weight, gram, round_weight(weight, gram, CodeFormat(bits=bits, group_size=16, scale_bits=8))[0])
        for bits in BITS
    ]
    assert all(2.5 * finer < coarser for coarser, finer in itertools.pairwise(errors))


@pytest.mark.parametrize(("bits", "d_in"), [(2, 9), (2, 70), (4, 9), (4, 70)])
def test_improving_ends_where_no_single_change_helps(bits, d_in):
    weight, gram = random_layer(d_in, 3, seed=1)
    rounded = improve(weight, gram, round_to_nearest(weight, scales_of(weight, gram, bits)), sweeps=200)
    least = reference.output_error(gram.matrix, weight, rounded.weight(torch.float64))
    for row, change in itertools.product(range(d_in), (-1, 1)):
        codes = rounded.codes.clone()
        codes[row] = (codes[row] + change).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        changed = codes * rounded.scales.by_input(d_in, torch.float64)
        assert (reference.output_error(gram.matrix, weight, changed) >= least * (1 - 1e-9)).all()


def test_refitted_scales_solve_the_least_squares():
    weight, gram = random_layer(24, 6)
    rounded = round_to_nearest(weight, scales_of(weight, gram, 3, group_size=8, scale_bits=16))
    root = torch.linalg.cholesky(gram.matrix, upper=True)
    refitted = refit_scales(gram, rounded, gram.slope(weight, rounded))
    assert torch.equal(refitted.codes, rounded.codes)
    errors = reference.output_error(gram.matrix, weight, refitted.weight(torch.float64))
    for column in range(6):
        groups = torch.block_diag(*rounded.codes[:, column].double().view(3, 8, 1))
        solution = torch.linalg.lstsq(root @ groups, root @ weight[:, column : column + 1]).solution
        least = float((root @ (weight[:, column : column + 1] - groups @ solution)).square().sum())
        assert least * (1 - 1e-9) <= errors[column] <= 1.001 * least


def test_a_group_without_codes_keeps_its_scale():
    weight, gram = random_layer(16, 4)
    scales = scales_of(weight, gram, 4, scale_bits=16)
    rounded = round_to_nearest(torch.cat([0 * weight[:8], weight[8:]]), scales)
    refitted = refit_scales(gram, rounded, gram.slope(weight, rounded)).scales
    torch.testing.assert_close(refitted.values(torch.float64)[0], scales.values(torch.float64)[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale_bits", [6, 8, 16])
def test_outputs_are_rounded_independently(scale_bits):
    weight, gram = random_layer(40, 12)
    layer = CodeFormat(bits=3, group_size=8, scale_bits=scale_bits)
    whole = round_weight(weight, gram, layer)[0].weight(torch.float64)
    part = round_weight(weight[:, :5], gram, layer)[0].weight(torch.float64)
    torch.testing.assert_close(part, whole[:, :5], rtol=1e-3 if scale_bits == 16 else 1e-6, atol=0)


def test_inputs_that_never_fire_do_no_harm():
    weight, gram = random_layer(16, 4)
    alive = gram.matrix.clone()
    alive[3], alive[:, 3] = 0, 0
    for matrix in (alive, 0 * alive):
        code_format = CodeFormat(bits=4, group_size=4, scale_bits=6)
        rounded = round_weight(weight, RoundingGram.of(matrix), code_format)[0].weight(torch.float64)
        assert rounded.isfinite().all()
        assert float((rounded - weight).abs().max()) < 1


def test_float32_is_nearly_as_good_as_float64():
    weight, gram = random_layer(96, 16, spread=2)
    narrow, narrow_gram = random_layer(96, 16, spread=2, dtype=torch.float32)
    layer = CodeFormat(bits=3, group_size=16, scale_bits=6)
    exact = error(weight, gram, round_weight(weight, gram, layer)[0])
    rounded = round_weight(narrow, narrow_gram, layer)[0].weight(torch.float64)
    assert reference.output_error(gram.matrix, weight, rounded).sum() == pytest.approx(exact, rel=0.03)
