"""Reachable targets: one judge for ratios, sizes and bits per weight, with and without profiles."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from rocket_core.errors import InfeasibleBudgetError
from rocket_core.sizes.budget import parameter_budget
from rocket_core.sizes.reachability import Reach
from rocket_core.sizes.target import ByBits, ByBytes, ByRatio

PARAMETERS = Reach(
    unit="parameters", dense=1000, smallest=300, certain=350, parameters=1000, unit_bytes=4, other_bytes=500
)
COUNT = st.integers(0, 10**12)
HUNDREDTHS = st.integers(1, 1600)


def test_the_ratio_that_is_certain_is_named():
    assert PARAMETERS.check(ByRatio(ratio=0.7)) == 0.7
    with pytest.raises(
        InfeasibleBudgetError, match=r"ratio 0\.701 .* at most 0\.7 of .* ask for 0\.65 or less, which"
    ) as caught:
        PARAMETERS.check(ByRatio(ratio=0.701))
    assert caught.value.nearest_ratio == 0.65


def test_the_size_that_is_certain_is_named():
    assert PARAMETERS.check(ByBytes(target_bytes=1700)) == 0.7
    with pytest.raises(
        InfeasibleBudgetError,
        match=r"^1\.699kB .* takes 500B, .* at least 1\.7kB; ask for 1\.9kB or more, which",
    ) as caught:
        PARAMETERS.check(ByBytes(target_bytes=1699))
    assert caught.value.nearest_ratio == 0.65


@pytest.mark.parametrize("size", [0, 499, 500])
def test_no_size_below_what_is_not_compressed_is_reached(size):
    layers_of_nothing = Reach(unit="bytes", dense=1000, smallest=0, certain=0, parameters=500, other_bytes=500)
    assert not layers_of_nothing.allows(ByBytes(target_bytes=size))
    assert layers_of_nothing.allows(ByBytes(target_bytes=501))


def test_a_size_that_the_dense_model_meets_removes_nothing():
    assert PARAMETERS.check(ByBytes(target_bytes=10**9)) == 0.0


@given(COUNT, COUNT, COUNT)
def test_the_budget_of_a_size_is_what_fits_to_the_byte(dense, room, other_bytes):
    room = min(room, dense)
    reach = Reach(unit="bytes", dense=dense + 1, smallest=0, certain=0, parameters=1, other_bytes=other_bytes)
    if room:
        ratio = reach.check(ByBytes(target_bytes=other_bytes + room))
        assert parameter_budget(reach.dense, ratio) == room


def test_the_bits_that_are_certain_are_named():
    # 300 of 1000 numbers of 32 bits.
    assert PARAMETERS.check(ByBits(bits=9.6)) == 0.7
    with pytest.raises(
        InfeasibleBudgetError,
        match=r"^9\.59 bits per weight .* at least 9\.6; ask for 11\.2 or more, which",
    ) as caught:
        PARAMETERS.check(ByBits(bits=9.59))
    assert caught.value.nearest_ratio == 0.65


def test_bits_that_the_dense_layers_have_remove_nothing():
    halves = Reach(unit="bytes", dense=2000, smallest=300, certain=300, parameters=1000, other_bytes=500)
    assert halves.check(ByBits(bits=16)) == 0.0
    assert halves.check(ByBits(bits=15.99)) > 0
    assert PARAMETERS.check(ByBits(bits=16)) == 0.5


@given(COUNT, st.sampled_from([2, 4]), HUNDREDTHS)
def test_the_budget_of_bits_is_what_fits_to_the_byte(parameters, itemsize, hundredths):
    dense = (parameters + 1) * itemsize
    reach = Reach(unit="bytes", dense=dense, smallest=0, certain=0, parameters=parameters + 1, other_bytes=7)
    fitting = min(dense, (parameters + 1) * hundredths // 800)
    if fitting:
        assert parameter_budget(dense, reach.check(ByBits(bits=hundredths / 100))) == fitting


@given(COUNT, COUNT, COUNT, COUNT, st.sampled_from([1, 2, 4, 8]))
def test_what_a_refusal_names_is_reachable(dense, smallest, certain, other_bytes, unit_bytes):
    dense += 1
    certain = min(certain, dense - 1) + 1
    reach = Reach(
        unit="parameters",
        dense=dense,
        smallest=min(smallest, certain),
        certain=certain,
        parameters=dense,
        unit_bytes=unit_bytes,
        other_bytes=other_bytes,
    )
    assert reach.allows(ByRatio(ratio=reach.ratio))
    assert reach.allows(ByBytes(target_bytes=reach.model_bytes))
    assert reach.allows(ByBits(bits=reach.bits))
    if not reach.allows(ByBytes(target_bytes=1)):
        with pytest.raises(InfeasibleBudgetError) as caught:
            reach.check(ByBytes(target_bytes=1))
        named = re.findall(r"(?:at least|ask for) ([\d.]+[kMGTP]?B)\b", str(caught.value))
        assert named
        for size in map(TypeAdapter(ByteSize).validate_python, named):
            assert reach.allows(ByBytes(target_bytes=size))


@given(st.integers(0, 10**14))
def test_sizes_of_messages_can_be_typed(size):
    reach = Reach(unit="bytes", dense=10**15, smallest=size + 1, certain=size + 1, parameters=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        reach.check(ByBytes(target_bytes=size))
    asked, smallest = re.search(r"^(\S+) is out .* at least (\S+); ask for that", str(caught.value)).groups()
    read = TypeAdapter(ByteSize).validate_python
    # Options round fractions of a byte down.
    assert size - 1 <= read(asked) <= size
    # Nearly the size, and reachable.
    assert size + 1 <= read(smallest) <= 1.001 * (size + 1) + 1
    reach.check(ByBytes(target_bytes=read(smallest)))


def test_what_is_between_the_two_named_sizes_is_accepted():
    with pytest.raises(InfeasibleBudgetError) as caught:
        PARAMETERS.check(ByBytes(target_bytes=1))
    read = TypeAdapter(ByteSize).validate_python
    named = [read(size) for size in re.findall(r"1\.\dkB", str(caught.value))]
    assert named == [PARAMETERS.other_bytes + 300 * 4, PARAMETERS.model_bytes]
    assert all(PARAMETERS.allows(ByBytes(target_bytes=size)) for size in named)
    assert not PARAMETERS.allows(ByBytes(target_bytes=named[0] - 1))
