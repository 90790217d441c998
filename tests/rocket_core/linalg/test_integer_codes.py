import itertools

import pytest
import torch

from rocket_core.linalg.integer_codes import RoundedWeight, Scales, search_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.sizes.code_format import CodeFormat
from tests.reference import rounding as reference

BITS = (2, 3, 4, 5, 6, 7, 8)
SCALE_BITS = (6, 8, 16)
STEPS_PER_OCTAVE = {6: 6, 8: 12, 16: 16}


def code_format(bits=4, group_size=4, scale_bits=16):
    return CodeFormat(bits=bits, group_size=group_size, scale_bits=scale_bits)


def random_weight(d_in, d_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)
    return weight, torch.rand(d_in, generator=generator, dtype=torch.float64) + 0.1


@pytest.mark.parametrize(("bits", "scale_bits"), list(itertools.product(BITS, SCALE_BITS)))
def test_codes_have_the_stated_bits(bits, scale_bits):
    weight, importance = random_weight(24, 40)
    scales = search_scales(weight, importance, code_format(bits, 8, scale_bits))
    codes = round_to_nearest(weight, scales).codes
    assert (int(codes.min()), int(codes.max())) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert scales.codes.dtype == (torch.float16 if scale_bits == 16 else torch.uint8)
    assert scale_bits == 16 or int(scales.codes.max()) < 2**scale_bits


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", BITS)
def test_a_weight_that_can_be_stored_is_exact(bits, sign):
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.float64)[:, None]
    weight = codes * sign * 0.25
    for scale_bits in SCALE_BITS:
        scales = search_scales(weight, torch.ones(len(weight)).double(), code_format(bits, len(weight), scale_bits))
        assert torch.equal(round_to_nearest(weight, scales).weight(torch.float64), weight)


@pytest.mark.parametrize(("scale_bits", "octaves"), [(6, 5), (8, 10), (16, 14)])
def test_scales_are_stored_to_half_a_step(scale_bits, octaves):
    values = 2.0 ** -torch.linspace(0, octaves, 500, dtype=torch.float64)[:, None] * torch.tensor([1.0, -1.0])
    stored = Scales.nearest(values, 0, code_format(scale_bits=scale_bits)).values(torch.float64)
    within = 2**-11 if scale_bits == 16 else 2 ** (0.5 / STEPS_PER_OCTAVE[scale_bits]) - 1
    assert torch.equal(stored.sign(), values.sign())
    assert float((stored / values - 1).abs().max()) <= 1.01 * within


@pytest.mark.parametrize(("scale_bits", "sign"), [(6, 32), (8, 128)])
def test_a_step_of_an_octave_halves_a_scale(scale_bits, sign):
    octave = STEPS_PER_OCTAVE[scale_bits]
    stored = torch.tensor([[0, octave, 2 * octave, sign + octave]], dtype=torch.uint8)
    scales = Scales(codes=stored, exponent=2 * octave, format=code_format(scale_bits=scale_bits))
    assert scales.values(torch.float32).tolist() == [[4.0, 2.0, 1.0, -2.0]]


@pytest.mark.parametrize("scale_bits", SCALE_BITS)
def test_no_stored_scale_is_zero(scale_bits):
    values = torch.tensor([[0.0, 1e-30, -1e-30, 1.0]], dtype=torch.float64)
    stored = Scales.nearest(values, 0, code_format(scale_bits=scale_bits)).values(torch.float32)
    assert bool((stored != 0).all())
    assert stored[0, 2] < 0


@pytest.mark.parametrize(("bits", "scale_bits"), [(2, 6), (2, 8), (4, 6), (4, 8)])
def test_the_search_finds_the_best_scale_it_may(bits, scale_bits):
    weight, importance = random_weight(12, 5, seed=bits)
    found = search_scales(weight, importance, code_format(bits, 4, scale_bits))
    steps = found.exponent - torch.arange(2 ** (scale_bits - 1), dtype=torch.float64)
    every = 2.0 ** (steps / STEPS_PER_OCTAVE[scale_bits])
    errors = (weight - round_to_nearest(weight, found).weight(torch.float64)).square() * importance[:, None]
    for group, column in itertools.product(range(3), range(5)):
        rows = slice(4 * group, 4 * group + 4)
        values = weight[rows, column].tolist()
        largest = max(map(abs, values)) / 2 ** (bits - 1)
        allowed = [float(s) for s in every if 0.4 * largest <= s <= largest * 2 ** (1 / STEPS_PER_OCTAVE[scale_bits])]
        least = reference.least_scale_error(values, importance[rows].tolist(), bits, [*allowed, *(-s for s in allowed)])
        assert float(errors[rows, column].sum()) <= least * (1 + 1e-9)


@pytest.mark.parametrize("scale_bits", SCALE_BITS)
def test_outputs_have_scales_of_their_own(scale_bits):
    weight, importance = random_weight(32, 20)
    layer = code_format(3, 8, scale_bits)
    whole = search_scales(weight, importance, layer).values(torch.float64)
    part = search_scales(weight[:, :7], importance, layer).values(torch.float64)
    torch.testing.assert_close(part, whole[:, :7], rtol=1e-6, atol=0)


def test_the_last_group_may_be_smaller():
    weight, importance = random_weight(10, 3)
    scales = search_scales(weight, importance, code_format(8, 4))
    assert scales.codes.shape == (3, 3)
    alone = search_scales(weight[8:], importance[8:], code_format(8, 4))
    torch.testing.assert_close(scales.values(torch.float64)[2:], alone.values(torch.float64), rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale_bits", SCALE_BITS)
def test_zeros_stay_zero(scale_bits):
    weight, importance = random_weight(8, 4)
    weight[:4] = 0
    for layer in (weight, 0 * weight):
        scales = search_scales(layer, importance, code_format(4, 4, scale_bits))
        rounded = round_to_nearest(layer, scales).weight(torch.float64)
        assert not rounded[:4].any()
        assert rounded.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale_bits", "group_size"), [(6, 1), (6, 4), (8, 3), (16, 4), (16, 10), (8, 99)])
def test_every_entry_is_its_code_times_its_scale(scale_bits, group_size, dtype):
    weight, importance = random_weight(10, 6)
    rounded = round_to_nearest(weight, search_scales(weight, importance, code_format(8, group_size, scale_bits)))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    scales = rounded.scales.values(exact)
    dense = rounded.weight(dtype)
    assert (dense.dtype, dense.shape) == (dtype, rounded.shape)
    for row, column in itertools.product(range(10), range(6)):
        product = rounded.codes[row, column].to(exact) * scales[row // group_size, column]
        assert dense[row, column] == product.to(dtype)
    assert torch.equal(rounded.rows(dtype), dense.T)
    assert rounded.rows(dtype).is_contiguous()


@pytest.mark.parametrize("scale_bits", SCALE_BITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_no_weight_overflows_or_vanishes_in_float32(scale_bits, sign):
    layer = code_format(8, 1, scale_bits)
    extremes = Scales.nearest(torch.tensor([[1e-300, -1e300]]).double(), sign * layer.largest_exponent, layer)
    codes = torch.tensor([[-128, -128]], dtype=torch.int8)
    if scale_bits == 16:
        extremes.codes[0, 1] = torch.finfo(torch.float16).min
    for largest in (codes, torch.ones_like(codes)):
        dense = RoundedWeight(codes=largest, scales=extremes).weight(torch.float32)
        assert dense.isfinite().all()
        assert (dense != 0).all()


@pytest.mark.parametrize("largest", [1e-40, 1e35])
def test_the_unit_of_scales_stays_in_its_range(largest):
    layer = code_format(2, 4, 8)
    scales = search_scales(torch.full((4, 1), largest).double(), torch.ones(4).double(), layer)
    assert abs(scales.exponent) <= layer.largest_exponent
