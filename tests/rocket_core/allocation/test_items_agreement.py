"""Layers that an engine fuses: every option stores all of them in the same way."""

import itertools
import random

import pytest

from rocket_core.allocation import Allocator, chosen
from rocket_core.budget import parameter_budget
from rocket_core.candidates import Candidate, FormatGroup, LayerProfile

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
