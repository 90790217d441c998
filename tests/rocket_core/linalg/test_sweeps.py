"""Sweeps, metrics and the other ways to choose a support, compared with explicit references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.linalg.factorization import (
    FactorizerSettings,
    factorize_layer,
    improve,
    prepare_layer,
    select_support,
    sweep,
    weight_distance,
)
from rocket_core.linalg.whitening import eigenbasis
from tests.reference import factorization as reference
from tests.reference import sweeps
from tests.rocket_core.linalg.test_factorization import prepared, random_layer

METRICS = ("frobenius", "l1", "spectral", "cosine")
few = settings(max_examples=30, deadline=None)


def whitened(weight, gram):
    return reference.whiten(weight, gram)[2]


@few
@given(
    shape=st.sampled_from([(12, 12), (16, 9), (9, 16)]),
    rank=st.integers(1, 9),
    fraction=st.floats(0.1, 0.95),
    seed=st.integers(0, 2**31),
)
def test_a_sweep_never_worsens_the_output(shape, rank, fraction, seed):
    weight, gram = random_layer(*shape, seed)
    nnz = max(1, round(fraction * rank * shape[1]))
    before = factorize_layer(prepared(weight, gram), rank, nnz)
    if before.support is None:
        return
    for _ in range(3):
        after = sweep(before)
        assert (after.rank, after.nnz) == (rank, nnz)
        assert int(after.support.sum()) == nnz
        assert not after.coefficients[~after.support].any()
        assert after.reconstruction_error <= before.reconstruction_error
        before = after


@pytest.mark.parametrize("shape", [(12, 12), (20, 10), (10, 20)])
def test_a_sweep_equals_the_explicit_one(shape):
    weight, gram = random_layer(*shape)
    rank, nnz = 7, 7 * shape[1] // 2
    before = factorize_layer(prepared(weight, gram), rank, nnz)
    support, error = sweeps.sweep(whitened(weight, gram), before.coefficients, nnz)
    after = sweep(before)
    assert torch.equal(after.support, support)
    assert after.reconstruction_error == pytest.approx(error, rel=1e-4)
    assert after.reconstruction_error < before.reconstruction_error


@pytest.mark.parametrize("shape", [(12, 12), (20, 10), (10, 20)])
def test_swept_errors_equal_the_explicit_reconstruction(shape):
    weight, gram = random_layer(*shape)
    factor = reference.whiten(weight, gram)[0]
    swept = factorize_layer(prepared(weight, gram, sweeps=3), 6, 3 * shape[1])
    approximation = swept.dictionary() @ swept.coefficients
    weight_error, whitened_error = reference.errors(weight, factor, approximation)
    assert swept.weight_error() == pytest.approx(weight_error, rel=1e-7)
    assert swept.reconstruction_error == pytest.approx(whitened_error, rel=1e-7)
    by_column = (factor @ (weight - approximation)).square().sum(dim=0)
    torch.testing.assert_close(swept.column_errors(), by_column, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("nnz", [40, 7 * 14])
def test_column_errors_add_up_to_the_error_of_the_layer(nnz):
    weight, gram = random_layer(10, 14)
    factorization = factorize_layer(prepared(weight, gram), 7, nnz)
    factor = reference.whiten(weight, gram)[0]
    approximation = factorization.dictionary() @ factorization.coefficients
    by_column = (factor @ (weight - approximation)).square().sum(dim=0)
    torch.testing.assert_close(factorization.column_errors(), by_column, rtol=1e-6, atol=1e-9)
    whole = factorization.reconstruction_error**2 * factorization.layer.whitened_energy
    assert float(factorization.column_errors().sum()) == pytest.approx(whole, rel=1e-7)


def test_float32_sweeps_stay_close_to_float64():
    weight, gram = random_layer(64, 64)
    basis = eigenbasis(weight, gram)
    errors = []
    for dtype in (torch.float32, torch.float64):
        layer = prepare_layer(weight, basis, FactorizerSettings(sweeps=3), dtype=dtype)
        swept = factorize_layer(layer, 40, 1300)
        errors.append(swept.reconstruction_error)
        actual = reference.errors(
            weight, reference.whiten(weight, gram)[0], (swept.dictionary() @ swept.coefficients).double()
        )
        assert errors[-1] == pytest.approx(actual[1], rel=1e-4)
    assert errors[0] == pytest.approx(errors[1], rel=1e-2)


def test_float32_sweeps_survive_a_dominating_direction():
    weight, gram = random_layer(64, 64)
    inputs = torch.zeros(64, dtype=torch.float64)
    inputs[3] = 1e4
    gram = gram + torch.outer(inputs, inputs)
    layer = prepare_layer(weight, eigenbasis(weight, gram), FactorizerSettings(sweeps=1), dtype=torch.float32)
    swept = factorize_layer(layer, 40, 1600)
    factor = reference.whiten(weight, gram)[0]
    approximation = swept.dictionary().double() @ swept.coefficients.double()
    explicit = reference.errors(weight, factor, approximation)[1]
    assert swept.reconstruction_error == pytest.approx(explicit, rel=1e-3)
    # With few digits the sweep would look useless.
    assert swept.reconstruction_error < 0.8 * factorize_layer(layer, 40, 1600, sweeps=0).reconstruction_error


def test_sweeps_are_applied_the_requested_number_of_times():
    weight, gram = random_layer(16, 16)
    plain = factorize_layer(prepared(weight, gram), 8, 60)
    twice = sweep(sweep(plain)).reconstruction_error
    assert factorize_layer(prepared(weight, gram, sweeps=2), 8, 60).reconstruction_error == twice
    assert factorize_layer(prepared(weight, gram, sweeps=2), 8, 60, sweeps=0).reconstruction_error == (
        plain.reconstruction_error
    )
    assert improve(plain, 2).reconstruction_error == twice
    low_rank = factorize_layer(prepared(weight, gram, sweeps=2), 8, 8 * 16)
    assert improve(low_rank) is low_rank


def test_a_sweep_handles_unused_atoms():
    weight, gram = random_layer(8, 8)
    before = factorize_layer(prepared(weight, gram, over_sparsification=0.0), 8, 8)
    assert bool((before.coefficients.abs().sum(dim=1) == 0).any())
    after = sweep(before)
    assert torch.isfinite(after.dictionary()).all()
    assert after.reconstruction_error <= before.reconstruction_error


@pytest.mark.parametrize("metric", METRICS)
def test_the_metric_defines_the_weight_error(metric):
    weight, gram = random_layer(12, 9)
    factorization = factorize_layer(prepared(weight, gram, metric=metric), 5, 25)
    approximation = factorization.dictionary() @ factorization.coefficients
    expected = sweeps.distance(weight, approximation, metric)
    assert factorization.weight_error() == pytest.approx(expected, rel=1e-7)


@few
@given(d_in=st.integers(1, 6), d_out=st.integers(1, 6), metric=st.sampled_from(METRICS), seed=st.integers(0, 2**31))
def test_metrics_equal_the_explicit_formulas(d_in, d_out, metric, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, noise = (torch.randn(d_in, d_out, generator=generator, dtype=torch.float64) for _ in range(2))
    weight[:, 0] *= seed % 2
    approximation = weight + 0.3 * noise
    expected = sweeps.distance(weight, approximation, metric) if weight.any() else None
    if expected is not None:
        assert weight_distance(weight, approximation, metric) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1e3])
def test_equal_weights_have_distance_zero(metric, dtype, scale):
    for seed in range(20):
        weight = (scale * torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))).to(dtype)
        assert weight_distance(weight, weight.clone(), metric) >= 0
        assert weight_distance(weight, weight.clone(), metric) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("metric", ["frobenius", "l1", "spectral"])
def test_a_zero_weight_has_no_error(metric):
    assert weight_distance(torch.zeros(3, 3), torch.zeros(3, 3), metric) == 0


@given(
    rank=st.integers(1, 9),
    d_out=st.integers(1, 9),
    fraction=st.floats(0, 1),
    sparsification=st.sampled_from(["per-row", "global"]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_row_and_global_supports_equal_sorting(rank, d_out, fraction, sparsification, seed):
    nnz = max(1, round(fraction * rank * d_out))
    scores = torch.rand(rank, d_out, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    support = select_support(scores, nnz, 0.3, sparsification)
    places = [(i, j) for i in range(rank) for j in range(d_out)]
    if sparsification == "global":
        kept = sorted(places, key=lambda place: -float(scores[place]))[:nnz]
    else:
        kept = []
        for i in range(rank):
            row = sorted((place for place in places if place[0] == i), key=lambda place: -float(scores[place]))
            kept += row[: nnz // rank + (1 if i < nnz % rank else 0)]
    assert {tuple(place) for place in support.nonzero().tolist()} == set(kept)
    assert int(support.sum()) == nnz


@pytest.mark.parametrize("sparsification", ["per-row", "global"])
def test_the_setting_decides_how_the_support_is_chosen(sparsification):
    weight, gram = random_layer(12, 12)
    layer = prepared(weight, gram, sparsification=sparsification)
    found = factorize_layer(layer, 6, 40).support
    assert torch.equal(found, select_support(layer.importance[:6], 40, 0.0, sparsification))
    assert not torch.equal(found, factorize_layer(prepared(weight, gram), 6, 40).support)
