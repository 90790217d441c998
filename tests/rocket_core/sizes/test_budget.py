from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, PROFILE_RATIOS
from rocket_core.sizes import budget

SIDES = st.integers(2, 3000)
RATIOS = st.sampled_from(PROFILE_RATIOS)


@given(parameters=st.integers(0, 10**12), hundredths=st.integers(0, 99))
def test_the_budget_is_exact_for_decimal_ratios(parameters, hundredths):
    ratio = hundredths / 100
    assert budget.parameter_budget(parameters, ratio) == parameters * (100 - hundredths) // 100


def test_the_budget_loses_no_parameter_to_binary_rounding():
    assert budget.parameter_budget(10, 0.3) == 7
    assert int((1 - 0.9) * 10) == 0
    assert budget.parameter_budget(10, 0.9) == 1


@given(parameters=st.integers(0, 10**12), hundredths=st.integers(1, 1600))
def test_the_bytes_of_bits_are_exact_for_decimal_bits(parameters, hundredths):
    assert budget.bits_budget(parameters, hundredths / 100) == parameters * hundredths // 800


@given(d_in=SIDES, d_out=SIDES, ratio=RATIOS)
def test_every_shape_stays_within_its_layer_budget(d_in, d_out, ratio):
    allowed = budget.parameter_budget(d_in * d_out, ratio)
    for rank, nnz in budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS):
        assert 1 <= rank <= min(d_in, d_out)
        assert rank <= nnz <= rank * d_out
        assert budget.kept_parameters(d_in, rank, nnz) <= allowed


@given(d_in=SIDES, d_out=SIDES, ratio=RATIOS)
def test_sparse_shapes_use_the_budget_to_the_last_parameter(d_in, d_out, ratio):
    allowed = budget.parameter_budget(d_in * d_out, ratio)
    for rank, nnz in budget.candidate_shapes(d_in, d_out, ratio, PROFILE_RANK_NNZ_RATIOS):
        if nnz < rank * d_out:
            assert budget.kept_parameters(d_in, rank, nnz) == allowed


def test_ranks_increase_without_repetition():
    ranks = [rank for rank, _ in budget.candidate_shapes(64, 64, 0.3, PROFILE_RANK_NNZ_RATIOS)]
    assert ranks == sorted(set(ranks))


@given(d_in=SIDES, d_out=SIDES, ratio=RATIOS, value=st.sampled_from(PROFILE_RANK_NNZ_RATIOS))
def test_the_rank_is_the_largest_within_the_budget(d_in, d_out, ratio, value):
    allowed = budget.parameter_budget(d_in * d_out, ratio)
    rank = budget.rank_for(d_in, d_out, allowed, value)
    cost = lambda atoms: atoms * d_in + Fraction(atoms * d_out) / Fraction(value)  # noqa: E731
    assert cost(rank) <= allowed * (1 + 1e-12)
    assert cost(rank + 1) > allowed * (1 - 1e-12)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 8, 4, 20), (4 * 8 + 20) * 2 + 8 * 1),
        ((8, 8, 4, 32), (4 * 8 + 32) * 2),
        ((8, 5, 9, 30), (72 + 30) * 2 + 5 * 2),
    ],
)
def test_bytes_include_the_mask_only_if_there_is_one(shape, expected):
    assert budget.factored_bytes(*shape, 2) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 8, 20), 20 * 2 + 8 * 1), ((9, 5, 30), 30 * 2 + 5 * 2), ((8, 8, 64), 64 * 2 + 8)],
)
def test_bytes_of_a_sparse_layer_always_include_the_mask(shape, expected):
    assert budget.sparse_bytes(*shape, 2) == expected


@given(d_in=SIDES, d_out=SIDES, rank=SIDES, nnz=SIDES, itemsize=st.sampled_from([2, 4]))
def test_a_shared_dictionary_is_counted_once(d_in, d_out, rank, nnz, itemsize):
    nnz = min(nnz, rank * d_out)
    alone = budget.factored_bytes(d_in, d_out, rank, nnz, itemsize)
    assert alone - budget.coefficient_bytes(d_out, rank, nnz, itemsize) == itemsize * d_in * rank


def test_the_achieved_ratio_is_the_removed_fraction():
    assert budget.achieved_ratio(200, 150) == 0.25


def test_a_layer_reports_what_is_left_and_what_is_zero():
    assert budget.kept_fraction(10, 20, 50) == 0.25
    assert budget.sparsity(10, 20, 50) == 0.75
    assert budget.remaining_parameters(1000, 200, 50) == 850
