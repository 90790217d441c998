"""The compiled loops against the reference in torch, which the tests of rounding compare with explicit ones."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from rocket_core.linalg import block_scales, integer_codes, kernels, rounding
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.entropy_rounding import RateTarget, StepScales, improve_for_rate, relative_steps, round_for_rate
from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.kernels import reference
from rocket_core.sizes.block_types import BLOCK_FORMATS
from rocket_core.sizes.code_format import CodeFormat
from tests.rocket_core.linalg.test_rounding import random_layer
from tests.sampling import sweep

BLOCK_TYPES = ("IQ4_NL", "Q4_K", "Q8_0", "INT8", "FP8", "NVFP4")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def grids(weight, gram):
    """Return grids of few and of many codes, with and without offsets, evenly spaced or not."""
    importance = gram.matrix.diagonal()
    found = [search_scales(weight, importance, CodeFormat(bits=bits, group_size=32, scale_bits=8)) for bits in (2, 4)]
    if len(weight) % 256 == 0:
        found += [search_block_scales(weight, importance, BLOCK_FORMATS[name]) for name in BLOCK_TYPES]
    return found


def codes_by(implementation, weight, gram):
    """Return all codes, and errors of outputs, that an implementation of the loops computes."""
    results = []
    with mock.patch.object(rounding, "for_device", return_value=implementation):
        for grid in grids(weight, gram):
            rounded = rounding.gptq(weight, gram, grid)
            slope = gram.slope(weight, rounded)
            improved = rounding.descend(weight, gram, rounded, slope)
            torch.testing.assert_close(slope, gram.slope(weight, improved), rtol=1e-3, atol=1e-2)
            results += [rounded.codes, improved.codes, rounding.errors_from(slope, weight, improved)]
        ones = torch.ones(weight.shape[1], dtype=weight.dtype, device=weight.device)
        target = RateTarget.of(StepScales.of(weight, relative_steps(gram, ones)), ones, 1.0)
        rounded, _ = round_for_rate(weight, gram, target)
        improved, errors = improve_for_rate(weight, gram, rounded, target.worth)
        results += [rounded.codes, improved.codes, errors]
    return results


def assert_same(found, expected, *, ties=1e-3):
    """Compare codes but for a share of ties, and the sums of errors, which these hardly change."""
    for own, other in zip(found, expected, strict=True):
        if not own.is_floating_point():
            assert float((own.cpu() != other).double().mean()) <= ties
        else:
            assert float(own.sum()) == pytest.approx(float(other.sum()), rel=max(ties, 1e-3))


@contextlib.contextmanager
def threaded(threads):
    """Divide even little work among some threads while the context is active."""
    from rocket_core.linalg.kernels import on_cpu

    with (
        mock.patch.object(torch, "get_num_threads", return_value=threads),
        mock.patch.object(on_cpu, "_WORTH_A_THREAD", 1),
    ):
        yield


@pytest.mark.parametrize(("columns", "expected"), [(2, 1), (512, 1), (1024, 2), (2**16, 3)])
def test_threads_are_started_for_enough_work_only(columns, expected):
    from rocket_core.linalg.kernels import on_cpu

    parts = []
    with mock.patch.object(torch, "get_num_threads", return_value=3):
        on_cpu._by_columns(columns, 2**10 * columns, lambda first, last: parts.append((first, last)))
    assert len(parts) == expected
    assert sum(last - first for first, last in parts) == columns


@DTYPES
@pytest.mark.parametrize(("shape", "threads"), [((1, 3), 1), ((70, 5), 1), ((70, 5), 3), ((256, 65), 3)])
def test_numba_computes_the_codes_of_the_reference(shape, dtype, threads):
    from rocket_core.linalg.kernels import on_cpu

    weight, gram = random_layer(*shape, dtype=dtype)
    expected = codes_by(reference, weight, gram)
    with threaded(threads):
        assert_same(codes_by(on_cpu, weight, gram), expected)


def scales_by(implementation, weight, importance):
    """Return all scales that an implementation of the loops finds."""
    formats = [CodeFormat(bits=bits, group_size=32, scale_bits=scale) for bits in (2, 4) for scale in (8, 16)]
    modules = integer_codes, block_scales
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "for_device", return_value=implementation))
        found = [
            search_scales(weight, importance, code_format, positive=positive).values(torch.float64)
            for code_format in formats
            for positive in (False, True)
        ]
        if len(weight) % 256 == 0:
            grids = [search_block_scales(weight, importance, BLOCK_FORMATS[name]) for name in BLOCK_TYPES]
            found += [grid.by_input(len(weight), torch.float64) for grid in grids]
    return found


@DTYPES
@pytest.mark.parametrize(("shape", "threads"), [((1, 3), 1), ((70, 5), 1), ((70, 5), 3), ((256, 65), 3)])
def test_numba_finds_the_scales_of_the_reference(shape, dtype, threads):
    from rocket_core.linalg.kernels import on_cpu

    weight, gram = random_layer(*shape, dtype=dtype)
    importance = gram.matrix.diagonal()
    expected = scales_by(reference, weight, importance)
    with threaded(threads):
        found = scales_by(on_cpu, weight, importance)
    for own, other in zip(found, expected, strict=True):
        assert float((own != other).double().mean()) <= 2e-3


def test_a_cpu_computes_with_numba():
    assert kernels.for_device(torch.device("cpu")).NAME == "numba"


def test_other_devices_compute_with_torch():
    assert kernels.for_device(torch.device("meta")) is reference


def test_names_are_recorded_in_all_open_blocks():
    with kernels.recorded_names() as outer:
        with kernels.recorded_names() as inner, kernels.recorded_names() as same:
            kernels.for_device(torch.device("meta"))
            assert inner == same == {"torch"}
        kernels.for_device(torch.device("cpu"))
        assert inner == {"torch"}
    kernels.for_device(torch.device("cpu"))
    assert outer == {"torch", "numba"}


# Interpreted, as the variable is read when Triton is imported.
INTERPRETED = """
import torch
from tests.rocket_core.linalg.kernels.test_kernels import assert_same, codes_by, random_layer, scales_by
from rocket_core.linalg.kernels import on_gpu, reference
on_gpu.BLOCK = 128  # two tiles to a launch
for shape, dtype in (((130, 3), torch.float32), ((20, 18), torch.float64)):
    weight, gram = random_layer(*shape, dtype=dtype)
    assert_same(codes_by(on_gpu, weight, gram), codes_by(reference, weight, gram))
weight, importance = weight[:70], gram.matrix.diagonal()[:70]
for own, other in zip(*(scales_by(kernels, weight, importance) for kernels in (on_gpu, reference)), strict=True):
    torch.testing.assert_close(own, other, rtol=1e-6, atol=0)
"""


def test_triton_computes_the_codes_of_the_reference():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=600)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", sweep([((1, 3),), ((70, 5),)], soak=[((256, 65),), ((1100, 20),)]))
def test_an_accelerator_computes_the_codes_of_the_reference(shape, dtype):
    device = torch.accelerator.current_accelerator()
    weight, gram = random_layer(*shape, dtype=dtype)
    moved = rounding.RoundingGram(
        matrix=gram.matrix.to(device), added=gram.added.to(device), order=gram.order.to(device)
    )
    found = codes_by(kernels.for_device(device), weight.to(device), moved)
    # What follows a tie differs as well: more codes of more inputs (3.9 % of 1,100 on an H200 in float32).
    assert_same(found, codes_by(reference, weight, gram), ties=0.02 * max(1, len(weight) / 256))
