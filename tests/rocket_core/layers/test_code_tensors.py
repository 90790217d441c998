import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.errors import CorruptCheckpointError
from rocket_core.layers import LayerEntry, layer_tensors, unpack_codes
from rocket_core.layers.code_tensors import check_codes
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes import budget
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import D_IN, D_OUT, EXPONENT, QUANTIZED, make_rounded, rounded_weight

FORMATS = st.builds(
    CodeFormat,
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8]),
    group_size=st.integers(1, 20),
    scale_bits=st.sampled_from([6, 8, 16]),
)


def read_bits(stream, bits, n):
    """Return n integers of a little-endian stream of bits, through one long integer."""
    number = int.from_bytes(stream, "little")
    assert number >> (bits * n) == 0
    return [(number >> (bits * index)) & (2**bits - 1) for index in range(n)]


@given(
    code_format=FORMATS,
    d_in=st.integers(1, 20),
    d_out=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_tensors_are_as_documented(code_format, d_in, d_out, seed):
    rounded = make_rounded(code_format, d_in, d_out, seed)
    tensors = layer_tensors(rounded, torch.bfloat16)
    assert {name: (tensor.dtype, tensor.ndim) for name, tensor in tensors.items()} == {
        "weight": (torch.uint8, 1),
        "weight_scale": (torch.uint8, 1),
    }
    codes = read_bits(tensors["weight"].numpy().tobytes(), code_format.bits, d_in * d_out)
    half = 2 ** (code_format.bits - 1)
    assert np.array_equal(np.reshape(codes, (d_out, d_in)).T - half, rounded.codes.numpy())
    groups, raw = math.ceil(d_in / code_format.group_size), tensors["weight_scale"].numpy().tobytes()
    if code_format.scale_bits == 16:
        scales = struct.unpack(f"<{groups * d_out}e", raw)
    else:
        scales = read_bits(raw, code_format.scale_bits, groups * d_out)
    assert np.array_equal(np.reshape(scales, (d_out, groups)).T, rounded.scales.codes.numpy())

    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored == budget.quantized_bytes(
        d_in, d_out, code_format.bits, code_format.group_size, code_format.scale_bits
    )


@given(code_format=FORMATS, d_in=st.integers(1, 20), d_out=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_unpacking_reverses_packing(code_format, d_in, d_out, seed):
    rounded = make_rounded(code_format, d_in, d_out, seed)
    tensors = layer_tensors(rounded, torch.float32)
    check_codes(**tensors, shape=(d_in, d_out), code_format=code_format, layer="q")
    unpacked = unpack_codes(**tensors, shape=(d_in, d_out), code_format=code_format, exponent=EXPONENT)
    assert torch.equal(unpacked.codes, rounded.codes)
    assert torch.equal(unpacked.scales.codes, rounded.scales.codes)
    torch.testing.assert_close(unpacked.rows(torch.float64), rounded_weight(rounded), rtol=1e-15, atol=0)


def test_packing_copies_its_input():
    for code_format in QUANTIZED.values():
        rounded = make_rounded(code_format)
        tensors = layer_tensors(rounded, torch.float32)
        before = rounded.rows(torch.float32)
        for tensor in tensors.values():
            tensor.zero_()
        assert torch.equal(rounded.rows(torch.float32), before)


def damaged(kind, damage):
    tensors = layer_tensors(make_rounded(QUANTIZED[kind]), torch.float32)
    damage(tensors)
    return tensors


def set_scale(value):
    return lambda t: t["weight_scale"][-2:].copy_(torch.tensor([value]).half().view(torch.uint8))


def set_last_bit(name):
    return lambda t: t[name][-1].bitwise_or_(128)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("int4", lambda t: t.update(weight=t["weight"][:-1]), "weight is .* not torch.uint8 of shape"),
        ("int4", lambda t: t.update(weight=t["weight"].float()), "weight is torch.float32"),
        ("int4", lambda t: t.update(weight=t["weight"][None]), "weight is"),
        ("int3", lambda t: t.update(weight_scale=t["weight_scale"][2:]), "weight_scale is"),
        ("int3", lambda t: t.update(weight_scale=t["weight_scale"].view(torch.float16)), "weight_scale is"),
        ("int3", set_scale(0.0), "a scale is zero or not finite"),
        ("int3", set_scale(-0.0), "a scale is zero or not finite"),
        ("int3", set_scale(math.inf), "a scale is zero or not finite"),
        ("int3", set_scale(math.nan), "a scale is zero or not finite"),
        ("int4", set_last_bit("weight"), "bits after the last"),
        ("int8", set_last_bit("weight"), "bits after the last"),
        ("int4", set_last_bit("weight_scale"), "bits after the last"),
        ("int8", set_last_bit("weight_scale"), "bits after the last"),
    ],
)
def test_damage_is_detected_and_the_layer_named(kind, damage, message):
    code_format = QUANTIZED[kind]
    with pytest.raises(CorruptCheckpointError, match=rf"^layers\.3\.q_proj: .*{message}"):
        check_codes(**damaged(kind, damage), shape=(D_IN, D_OUT), code_format=code_format, layer="layers.3.q_proj")


def documented(title):
    """Return a section of the page about the format."""
    text = (Path(__file__).parents[3] / "docs/reference/artifact.md").read_text(encoding="utf-8")
    return text.partition(f"\n{title}\n")[2].partition("\n## ")[0]


def test_the_documented_example_is_what_is_stored():
    example = documented("## Quantized layers").partition("### Example")[2]
    [entry] = re.findall(r"`(\{.*?\})`", example)
    rows = dict(re.findall(r"^\| (.+?) \| (.+ \| .+) \|$", example, flags=re.MULTILINE))
    numbers = {
        title: [json.loads(f"[{cell}]") for cell in row.split(" | ")]
        for title, row in rows.items()
        if title != "scales"
    }
    stored = dict(re.findall(r"^- `(\w+)`: .*?: `([0-9a-f ]+)`\.", example, flags=re.MULTILINE))

    entry = LayerEntry(**json.loads(entry))
    scales = torch.tensor(numbers["stored scales"], dtype=torch.uint8).T
    rounded = RoundedWeight(
        codes=torch.tensor(numbers["codes"], dtype=torch.int8).T,
        scales=Scales(codes=scales, exponent=entry.scale_exponent, format=entry.code_format),
    )
    tensors = layer_tensors(rounded, torch.float32)
    assert {name: tensor.numpy().tobytes().hex(" ") for name, tensor in tensors.items()} == stored
    assert stored.keys() == {"weight", "weight_scale"}
    assert rounded.rows(torch.float32).tolist() == numbers["weights"]
    assert (rounded.codes.T + 4).tolist() == numbers["stored with 4 added"]


def test_the_documented_stream_is_that_of_its_codes():
    section = documented("## Entropy-coded layers")
    codes = json.loads("[" + re.search(r"with the codes ([-\d, ]+) and (\d+)", section).expand(r"\1, \2") + "]")
    entry = LayerEntry(**json.loads(re.search(r"`(\{.*?\})`", section)[1]))
    stored = {
        name: torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)
        for name, data in re.findall(r"^- `(weight\w*)`:[^`]*`([0-9a-f ]+)`", section, flags=re.MULTILINE)
    }
    shape, code_format = (len(codes), 1), entry.code_format
    check_codes(**stored, shape=shape, code_format=code_format, layer="q", coded_bytes=entry.coded_bytes)
    rounded = unpack_codes(
        **stored, shape=shape, code_format=code_format, exponent=entry.scale_exponent, entropy_coded=True
    )
    assert rounded.rows(torch.float32).tolist() == [codes]
