"""Low-rank candidates and layers whose factors are codes, compared with the explicit weight and the written tensors."""

import itertools
from unittest import mock

import pytest
import torch

from rocket_core.candidates import Candidate
from rocket_core.config import CompressionConfig
from rocket_core.layers import approximation, layer_tensors
from rocket_core.linalg.factor_rounding import round_factors
from rocket_core.linalg.rounding import RoundingGram
from rocket_core.methods import method_for, rounded_factors
from rocket_core.sizes.code_format import FACTOR_CODES, fewest_coded_bytes
from tests.reference.problems import example
from tests.sampling import sweep


def rocket(**settings):
    base = {"ratio": 0.4, "objective": "whitened", "budget": "bytes", "kinds": ("low_rank", "quantized")}
    return method_for(CompressionConfig(**{**base, **settings}), 2)


def code(*, size, error):
    errors = {"reconstruction_error": error, "weight_error": error}
    return Candidate(kind="entropy_coded", kept_parameters=1, stored_bytes=size, **errors)


def with_codes(candidates):
    return [candidate for candidate in candidates if candidate.kind == "low_rank" and candidate.bits is not None]


@pytest.mark.parametrize(
    ("shape", "weights"),
    sweep([((60, 80), 2), ((24, 200), None)], soak=[((96, 128), None), ((96, 128), 2), ((150, 60), 2)]),
)
def test_layers_have_the_bytes_and_errors_predicted(shape, weights):
    layer = example(shape[0], shape[1:], weights=weights)
    method = rocket()
    candidates = with_codes(method.profile(layer.problem))
    assert candidates
    for candidate in candidates:
        assert candidate.code_format == FACTOR_CODES
        assert candidate.nnz == candidate.rank * shape[1]
        assert candidate.kept_parameters == candidate.rank * sum(shape)
        assert fewest_coded_bytes(*shape) <= candidate.stored_bytes <= shape[0] * shape[1] * 3 / 8
        assert (candidate.loss is None) == (weights is None)
        compressed = method.compress(layer.problem, candidate)
        tensors = layer_tensors(compressed.factors, torch.float16)
        assert set(tensors) == {"weight", "weight_scale", "weight_u", "weight_u_scale"}
        assert sum(tensor.nbytes for tensor in tensors.values()) == candidate.stored_bytes
        error, relative, _, _ = layer.errors(approximation(compressed.factors, torch.float64))
        assert float(compressed.errors.sum()) == pytest.approx(error, rel=1e-4)
        assert relative <= 1.001 * candidate.reconstruction_error


def test_errors_are_those_of_gptq_with_an_allowance():
    layer = example(60, (80,), weights=2)
    problem, gram = layer.problem, RoundingGram.of(layer.problem.gram())
    for candidate in rounded_factors.profile(problem, gram, [code(size=1, error=1.0)]):
        rows = problem.unscaled(problem.rough_basis().directions[:, : candidate.rank].mT)
        importance = problem.output_weights.square()
        rounded = round_factors(problem.weight, gram, importance, rows, candidate.code_format, improved=False)
        _, relative, distance, loss = layer.errors(rounded.weight(torch.float64))
        allowed = rounded_factors.ALLOWANCE
        assert candidate.reconstruction_error == pytest.approx(relative * allowed**0.5, rel=1e-3)
        assert candidate.weight_error == pytest.approx(distance, rel=1e-3)
        assert candidate.loss == pytest.approx(loss * allowed, rel=1e-3)


def test_more_atoms_take_more_bytes_and_leave_less_error():
    layer = example(96, (128,), weights=1)
    gram = RoundingGram.of(layer.problem.gram())
    candidates = rounded_factors.profile(layer.problem, gram, [code(size=1, error=1.0)])
    assert len(candidates) >= 5
    for larger, smaller in itertools.pairwise(candidates):
        assert larger.rank > smaller.rank
        assert larger.stored_bytes > smaller.stored_bytes
        assert larger.loss < smaller.loss


def test_they_end_before_the_first_that_codes_of_the_weight_beat():
    problem = example(96, (128,), weights=1).problem
    gram = RoundingGram.of(problem.gram())
    every = rounded_factors.profile(problem, gram, [code(size=1, error=1.0)])
    beaten = every[-3]
    codes = [code(size=every[-2].stored_bytes, error=1.0), code(size=beaten.stored_bytes, error=0.0)]
    assert rounded_factors.profile(problem, gram, codes) == every[-2:]
    smaller = [code(size=beaten.stored_bytes + 1, error=0.0)]
    assert rounded_factors.profile(problem, gram, smaller) == every[-3:], "codes that are larger beat nothing"


def test_factors_that_lose_as_they_are_are_not_rounded():
    problem = example(96, (128,), weights=1).problem
    gram = RoundingGram.of(problem.gram())
    first = rounded_factors.profile(problem, gram, [code(size=1, error=1.0)])[-1]
    energy = float(problem.output_energies().sum())
    kept = float(problem.eigenbasis().singular_values[: first.rank].square().sum())
    unrounded = (rounded_factors.ALLOWANCE * (1 - kept / energy)) ** 0.5
    for error, calls in ((unrounded * 0.999, 0), (unrounded * 1.001, 1)):
        with mock.patch.object(rounded_factors, "round_factors", wraps=round_factors) as rounding:
            assert not rounded_factors.profile(problem, gram, [code(size=first.stored_bytes, error=error)])
        assert rounding.call_count == calls


@pytest.mark.parametrize(
    "settings",
    [{"kinds": ("quantized",)}, {"kinds": ("low_rank", "sparse")}, {"code_bits": 4}, {"budget": "parameters"}],
)
def test_other_settings_leave_factors_as_they_are(settings):
    layer = example(60, (80,), weights=None)
    assert not with_codes(rocket(**settings).profile(layer.problem))
