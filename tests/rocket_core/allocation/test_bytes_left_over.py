"""Bytes that the allocation leaves of a size, with the shapes of a small model."""

import math
import random

from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import compression_config
from rocket_core.sizes.code_format import formats_for
from tests.reference.allocations import allocate

# (d_in, d_out) of the layers of a block of stories260K, whose smallest layers are a hundredth of the whole.
SHAPES = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "gate": (64, 172), "up": (64, 172)}
SHAPES |= {"down": (172, 64)}
BLOCKS = 5


def layer(name, shape, formats, sensitivity):
    d_in, d_out = shape
    weights = d_in * d_out

    def candidate(kind, stored_bytes, loss, **codes):
        errors = {"reconstruction_error": loss, "weight_error": loss, "loss": loss}
        return Candidate(kind=kind, kept_parameters=weights, stored_bytes=stored_bytes, **errors, **codes)

    # The step is a part of the largest of a group's entries, and a scale of few bits is further from the best one.
    rounded = [
        candidate(
            "quantized",
            one.stored_bytes(d_in, d_out),
            sensitivity * weights * 4.0**-one.bits * math.log(2 * one.group_size) * (1 + 2.0**-one.scale_bits),
            bits=one.bits,
            group_size=one.group_size,
            scale_bits=one.scale_bits,
        )
        for one in formats
    ]
    return LayerProfile(
        name=name,
        d_in=d_in,
        d_out=d_out,
        input_group=name,
        tokens=1,
        candidates=(candidate("dense", 2 * weights, 0.0), *rounded),
    )


def test_formats_are_fine_enough_to_use_a_size_up():
    draw = random.Random(0)
    choices = compression_config(budget="bytes", storage="memory").code_choices
    layers = [
        layer(f"layers.{block}.{name}", shape, formats_for(shape[0], choices), draw.lognormvariate(0, 2))
        for block in range(BLOCKS)
        for name, shape in SHAPES.items()
    ]
    dense = sum(one.candidates[0].stored_bytes for one in layers)
    for percent in range(20, 90):
        found = allocate(layers, 1 - percent / 100, objective="fisher", cap_slack=0.01, budget_unit="bytes", itemsize=2)
        stored = sum(one.candidates[pick].stored_bytes for one, pick in zip(layers, found.choices, strict=True))
        assert 0.998 * percent / 100 <= stored / dense <= percent / 100, percent
