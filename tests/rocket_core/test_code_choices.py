"""Formats that a request allows quantized layers to have."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.shared.requests import JobRequest
from rocket_core.config import KINDS, compression_config
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.inspection.checks.feasibility import any_selection_allows, reach_of_layers
from rocket_core.inspection.headers.weight_summary import WeightSummary
from rocket_core.layers.code_stream import coded_bytes
from rocket_core.sizes.code_format import (
    ANY_CODES,
    CODE_BITS,
    MEMORY_GROUPS,
    CodeChoices,
    coded_format,
    fewest_bytes,
    fewest_coded_bytes,
    formats_for,
)
from rocket_core.sizes.target import ByBits

SIZES = (0, 8, 16, 32, 64, 128)
BYTES = {"ratio": 0.5, "budget": "bytes"}

some_bits = st.lists(st.sampled_from(CODE_BITS), min_size=1, unique=True).map(tuple)
some_sizes = st.lists(st.sampled_from(SIZES), min_size=1, unique=True).map(tuple)


@given(bits=some_bits, sizes=some_sizes, d_in=st.integers(1, 300))
def test_formats_have_the_bits_and_groups_asked_for(bits, sizes, d_in):
    formats = formats_for(d_in, CodeChoices(bits=bits, group_sizes=sizes))
    asked = {min(size, d_in) if size else d_in for size in sizes}
    assert {(one.bits, one.group_size) for one in formats} == set(itertools.product(bits, asked))
    assert len(formats) == len(bits) * len(asked)


@given(bits=some_bits, d_in=st.integers(1, 300), d_out=st.integers(1, 50))
def test_bits_alone_leave_the_usual_groups(bits, d_in, d_out):
    choices = replace(ANY_CODES, bits=bits)
    limited, everything = formats_for(d_in, choices), formats_for(d_in)
    assert limited == tuple(one for width in bits for one in everything if one.bits == width)
    fewest = fewest_bytes(d_in, d_out, choices)
    assert fewest == min(one.stored_bytes(d_in, d_out) for one in limited) >= fewest_bytes(d_in, d_out)


@pytest.mark.parametrize(("storage", "sizes"), [("file", {8, 16}), ("memory", {32})])
def test_more_than_8_bits_per_weight_are_offered(storage, sizes):
    choices = compression_config(**BYTES, storage=storage).code_choices
    finest = [one for one in formats_for(128, choices) if one.scale_bits == 16 and one.group_size < 64]
    assert {one.group_size for one in finest} == sizes
    assert {one.bits for one in finest} == {8}
    assert {one.stored_bytes(128, 48) / (16 * 48) for one in finest} == {8 + 16 / size for size in sizes}
    asked = compression_config(**BYTES, storage=storage, group_size=(16, 32)).code_choices
    assert all(one.scale_bits < 16 for one in formats_for(128, asked))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": 0.5, "code_bits": (4, 8)}, "kind quantized and a size"),
        ({**BYTES, "kinds": ("sparse",), "group_size": 32}, "kind quantized and a size"),
        ({**BYTES, "kinds": ("entropy_coded",), "code_bits": 8}, "kind quantized and a size"),
        ({**BYTES, "code_bits": (4, 4)}, "code_bits has the same entry twice"),
        ({**BYTES, "code_bits": (4, 9)}, "code_bits.1: Input should be 2, 3, 4, 5, 6, 7 or 8"),
        ({**BYTES, "group_size": ()}, "at least 1 item"),
        ({**BYTES, "group_size": 24}, "group_size.0: Input should be 0, 8, 16, 32, 64 or 128"),
        ({"method": "gptq", "code_bits": (4, 8)}, "one format: give one of code_bits and group_size"),
        ({"method": "rtn", "group_size": (32, 64)}, "one format: give one of code_bits and group_size"),
    ],
)
def test_formats_that_no_layer_can_have_are_refused(settings, said):
    with pytest.raises(InvalidConfigError, match=said):
        compression_config(**settings)


def test_entropy_coding_has_no_bits_to_choose():
    assert compression_config(**BYTES).entropy_codes
    for limit in ({"code_bits": 8}, {"group_size": (32, 64)}):
        limited = compression_config(**BYTES, **limit)
        assert not limited.entropy_codes
        assert limited.quantizes
    for kinds, storage, coded, factors in (
        (KINDS, "file", True, True),
        (KINDS, "memory", False, True),
        (("quantized", "entropy_coded"), "file", True, False),
        (("quantized", "entropy_coded"), "memory", False, False),
        (("low_rank", "sparse"), "memory", False, False),
    ):
        choices = compression_config(**BYTES, kinds=kinds, storage=storage).code_choices
        sizes = MEMORY_GROUPS if storage == "memory" else None
        assert choices.fixed == ("quantized" in kinds)
        found = replace(choices, alone=False, fixed=True)
        assert found == replace(ANY_CODES, entropy_coded=coded, factors=factors, group_sizes=sizes)


@pytest.mark.parametrize(
    ("choices", "bits"),
    [({}, 2.01), ({"entropy_coded": True}, 1.01), ({"factors": True}, 1.25), ({"fixed": False}, 16.0)],
    ids=str,
)
def test_the_fewest_bits_are_known_from_shapes(choices, bits):
    codes = CodeChoices(alone=True, **choices)
    reach = reach_of_layers([(1024, 1024)], itemsize=2, other_bytes=0, quantizes=True, codes=codes)
    assert reach.smallest == reach.certain
    assert reach.bits == bits
    with pytest.raises(InfeasibleBudgetError, match="ask for that or more"):
        reach.check(ByBits(bits=bits - 0.02))


@pytest.mark.parametrize("shape", [(8, 8), (16, 24), (64, 16)])
def test_how_small_entropy_codes_of_small_layers_get_is_a_bound(shape):
    codes = CodeChoices(alone=True, fixed=False, entropy_coded=True)
    reach = reach_of_layers([shape], itemsize=4, other_bytes=0, quantizes=True, codes=codes)
    empty = coded_bytes(torch.zeros(shape, dtype=torch.int8)) + coded_format(shape[0]).scale_bytes(*shape)
    assert reach.smallest <= max(empty, fewest_coded_bytes(*shape)) <= reach.certain


def test_bits_out_of_reach_of_the_codes_are_refused():
    # 2 MiB as 16 bits; 4-bit codes with an 8-bit scale for every 64 inputs take 4.125 bits.
    layers = [(1024, 1024)]
    codes = CodeChoices(bits=(4, 8), group_sizes=(64,), alone=True)
    reach = reach_of_layers(layers, itemsize=2, other_bytes=0, quantizes=True, codes=codes)
    assert reach.bits == 4.13
    assert reach.check(ByBits(bits=4.125)) > 0
    with pytest.raises(InfeasibleBudgetError, match=r"at least 4\.13; ask for that or more"):
        reach.check(ByBits(bits=4.1))
    weights = WeightSummary(dtype_bytes={"F16": 2**21}, block_shapes={(1024, 1024): 1})
    config = compression_config(bits=4.1, code_bits=(4, 8), group_size=(64,), kinds=("quantized",))
    assert not any_selection_allows(weights, config.target, config, 2)


def test_zeros_and_factors_may_take_less_than_the_codes():
    weights = WeightSummary(dtype_bytes={"F16": 2**21}, block_shapes={(1024, 1024): 1})
    target = ByBits(bits=6)
    for kinds in (("quantized", "sparse"), ("quantized",)):
        config = compression_config(bits=6, code_bits=(8,), kinds=kinds)
        assert any_selection_allows(weights, target, config, 2) is ("sparse" in kinds)


def test_one_number_is_sent_as_it_was_before_lists():
    request = JobRequest(model_id="local/x", bits=4, options={"code_bits": [4], "group_size": 32})
    assert '"code_bits":4,"group_size":32' in request.model_dump_json()
    several = JobRequest(model_id="local/x", bits=4, options={"code_bits": [4, 8]})
    assert '"code_bits":[4,8],"group_size":null' in several.model_dump_json()
    for made in (request, several):
        assert JobRequest.model_validate_json(made.model_dump_json()) == made
        assert made.options.model_dump() == made.compression_config().model_dump(include=set(made.options.model_dump()))
    assert (
        len({request.fingerprint(), several.fingerprint(), JobRequest(model_id="local/x", bits=4).fingerprint()}) == 3
    )
