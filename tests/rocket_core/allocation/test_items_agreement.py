"""Layers that an engine fuses: every option stores all of them in the same way."""

import itertools
import random

import pytest

from rocket_core.allocation import Allocator, chosen
from rocket_core.candidates import Candidate, FormatGroup, LayerProfile
from rocket_core.sizes.budget import parameter_budget

WAYS = [(4, 32), (4, 64), (8, 32)]


def candidate(bits=None, group_size=None, stored_bytes=1000, loss=0.0):
    codes = {} if bits is None else {"bits": bits, "group_size": group_size, "scale_bits": 16}
    return Candidate(
        kind="dense" if bits is None else "quantized",
        kept_parameters=500,
        stored_bytes=stored_bytes,
        reconstruction_error=loss,
        weight_error=loss,
        loss=loss,
        **codes,
    )


def layers(seed):
    """Return profiles of two groups, of three layers and of one; the second layer lacks one format."""
    draw = random.Random(seed)
    profiles = []
    for number, group in enumerate(("q", "q", "q", "o")):
        ways = WAYS[:2] if number == 1 else WAYS
        quantized = [candidate(*way, stored_bytes=draw.randint(100, 900), loss=draw.random()) for way in ways]
        draw.shuffle(quantized)
        profiles.append(
            LayerProfile(
                name=f"layer{number}",
                d_in=128,
                d_out=4,
                input_group=group,
                tokens=9,
                candidates=(candidate(), *quantized),
            )
        )
    return profiles


@pytest.mark.parametrize("dense", [False, True])
def test_groups_may_have_to_be_quantized(dense):
    profiles = layers(0)
    groups = [FormatGroup(layers=("layer1", "layer3"), dense=dense)]
    allocator = Allocator(profiles, objective="fisher", cap_slack=0.0, budget_unit="bytes", format_groups=groups)
    kinds = [found.kind for _, found in chosen(profiles, allocator.allocate(0.0), itemsize=1)]
    expected = "dense" if dense else "quantized"
    assert kinds == ["dense", expected, "dense", expected]


def test_block_types_are_told_apart():
    profiles = []
    for number, types in enumerate((("Q8_0", "Q4_0"), ("Q4_0", "Q8_0"))):
        options = [
            Candidate(
                kind="quantized",
                block_type=block_type,
                kept_parameters=500,
                stored_bytes={"Q8_0": 500, "Q4_0": 250}[block_type],
                reconstruction_error=0.1,
                weight_error=0.1,
                loss=0.1 + number,
            )
            for block_type in types
        ]
        profiles.append(
            LayerProfile(
                name=f"layer{number}",
                d_in=32,
                d_out=1,
                input_group=f"layer{number}",
                tokens=9,
                candidates=(candidate(), *options),
            )
        )
    groups = [FormatGroup(layers=("layer0", "layer1"))]
    allocator = Allocator(profiles, objective="fisher", cap_slack=0.0, budget_unit="bytes", format_groups=groups)
    found = [candidate.block_type for _, candidate in chosen(profiles, allocator.allocate(0.6), itemsize=1)]
    assert found == ["Q4_0", "Q4_0"]


def way(found):
    return found.kind, found.bits, found.group_size


@pytest.mark.parametrize("seed", range(20))
def test_the_allocation_is_the_best_that_agrees(seed):
    profiles = layers(seed)
    allocator = Allocator(
        profiles,
        objective="fisher",
        cap_slack=0.0,
        budget_unit="bytes",
        itemsize=2,
        format_groups=[FormatGroup(layers=("layer0", "layer1", "layer2"))],
    )
    ratio = round(min(0.4, allocator.reachable_ratio), 4)
    selected = chosen(profiles, allocator.allocate(ratio), itemsize=2)
    budget = parameter_budget(4000, ratio)
    feasible = [
        sum(found.loss for found in choice)
        for choice in itertools.product(*(profile.candidates for profile in profiles))
        if len({way(found) for found in choice[:3]}) == 1 and sum(found.stored_bytes for found in choice) <= budget
    ]
    found = [candidate for _, candidate in selected]
    assert len({way(candidate) for candidate in found[:3]}) == 1
    assert sum(candidate.stored_bytes for candidate in found) <= budget
    assert sum(candidate.loss for candidate in found) == pytest.approx(min(feasible))
