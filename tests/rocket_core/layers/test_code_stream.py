"""The stream of entropy-coded codes, read by definition, and damaged."""

import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.layers import LayerEntry, QuantizedLinear, code_stream, layer_tensors, read_entries
from rocket_core.layers.code_stream import coded_bytes, decode_codes, encode_codes, expected_bytes
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import make_rounded

CODES = st.lists(st.integers(-127, 127) | st.integers(-2, 2), min_size=1, max_size=300)
MOST = {1: 127, 2: 7, 3: 2}


def laplace(n, scale, seed=0):
    values = np.rint(np.random.default_rng(seed).laplace(size=n) * scale)
    return torch.from_numpy(np.clip(values, -127, 127).astype(np.int8))


def read(stream, n):
    """Return the codes of a stream one by one, as the documentation defines them."""
    number, data = stream[0], zlib.decompress(stream[1:])
    most = MOST[number]
    packed, excess = data[: -(-n // number)], iter(data[-(-n // number) :])
    digits = [byte // (2 * most + 1) ** place % (2 * most + 1) - most for byte in packed for place in range(number)]
    assert not any(digits[n:])
    codes = [code + (np.sign(code) * next(excess) if abs(code) == most else 0) for code in digits[:n]]
    assert next(excess, None) is None
    return codes


@given(CODES)
@settings(max_examples=200, deadline=None)
def test_a_stream_is_as_documented_and_decodes(codes):
    values = torch.tensor(codes, dtype=torch.int8)
    stream = encode_codes(values)
    assert read(stream.numpy().tobytes(), len(codes)) == codes
    assert torch.equal(decode_codes(stream, len(codes), layer="q"), values)
    assert torch.equal(encode_codes(values), stream)


@pytest.mark.parametrize("scale", [4, 0.7])
def test_threads_deflate_parts_of_one_stream(scale, monkeypatch):
    codes = laplace(2**13, scale)
    whole = len(encode_codes(codes))
    monkeypatch.setattr(code_stream, "_PART", 1000)
    streams = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        streams.append(encode_codes(codes))
    assert torch.equal(*streams)
    assert whole < len(streams[0]) < whole + 1000
    assert torch.equal(decode_codes(streams[0], len(codes), layer="q"), codes)
    assert read(streams[0].numpy().tobytes(), len(codes)) == codes.tolist()


@pytest.mark.parametrize(
    ("scale", "waste"), [(4, 0.012), (2, 0.012), (1.5, 0.01), (1, 0.015), (0.7, 0.02), (0.4, 0.025)]
)
def test_a_stream_is_little_longer_than_the_entropy(scale, waste):
    codes = laplace(2**18, scale)
    counts = codes.unique(return_counts=True)[1].double()
    entropy = float(-(counts * (counts / counts.sum()).log2()).sum()) / 8
    assert entropy <= len(encode_codes(codes)) <= (1 + waste) * entropy


@pytest.mark.parametrize("scale", [20, 1.5, 0.3])
def test_damage_never_gives_other_codes(scale):
    codes = laplace(500, scale)
    stream, found = encode_codes(codes), 0
    for place in range(len(stream)):
        for bit in (1, 128):
            damaged = stream.clone()
            damaged[place] ^= bit
            try:  # a few bits that fill up a byte have no meaning
                assert torch.equal(decode_codes(damaged, 500, layer="layers.3"), codes)
            except CorruptCheckpointError as error:
                found += bool(re.match(r"layers\.3: .*copy the files again", str(error)))
    assert found >= 2 * len(stream) - 8
    for shorter in range(len(stream)):
        with pytest.raises(CorruptCheckpointError):
            decode_codes(stream[:shorter], 500, layer="layers.3")
    with pytest.raises(CorruptCheckpointError, match="after the last"):
        decode_codes(torch.cat([stream, stream[:1]]), 500, layer="layers.3")
    for other in (1, 470, 530):
        with pytest.raises(CorruptCheckpointError):
            decode_codes(stream, other, layer="layers.3")


@pytest.mark.parametrize(
    ("number", "data", "message"),
    [
        (2, bytes([225]), "not 2 codes"),
        (2, bytes([112 + 1]), "after the last"),
        (2, bytes([14 + 7 * 15, 121]), "beyond 127"),
        (2, bytes([14 + 7 * 15]), "too early"),
        (2, bytes([112]) + bytes(2**20), "after the last code"),
    ],
)
def test_bytes_without_a_meaning_are_refused(number, data, message):
    data = bytes([113 + 15]) if message == "after the last" else data
    stream = torch.tensor(list(bytes([number]) + zlib.compress(data)), dtype=torch.uint8)
    with pytest.raises(CorruptCheckpointError, match=message):
        decode_codes(stream, 1, layer="q")


def coded(scale_bits=6, dtype=torch.float32):
    """Return an entropy-coded weight of 7 inputs and 5 outputs, and its packed layer."""
    plain = make_rounded(CodeFormat(bits=8, group_size=7, scale_bits=scale_bits))
    rounded = RoundedWeight(codes=plain.codes.clamp_min(-127), scales=plain.scales, entropy_coded=True)
    tensors = layer_tensors(rounded, dtype)
    layer = QuantizedLinear(
        7,
        5,
        code_format=rounded.scales.format,
        scale_exponent=rounded.scales.exponent,
        coded_bytes=len(tensors["weight"]),
        dtype=dtype,
    )
    layer.load_state_dict(tensors)
    return rounded, layer


@pytest.mark.parametrize("scale_bits", [6, 8, 16])
@pytest.mark.parametrize("unpack", [False, True])
def test_a_layer_computes_with_the_decoded_codes(scale_bits, unpack):
    rounded, layer = coded(scale_bits)
    if unpack:
        layer.unpack_()
    assert torch.equal(layer(torch.eye(7)), rounded.weight(torch.float32))
    saved = layer.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in layer_tensors(rounded, torch.float32).items())


@pytest.mark.parametrize("unpack", [False, True])
def test_a_damaged_stream_is_found_when_it_is_loaded(unpack):
    _, layer = coded()
    if unpack:
        layer.unpack_()
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["weight"][-1] ^= 1
    with pytest.raises(CorruptCheckpointError, match="stream of codes is damaged"):
        layer.load_state_dict(state) if unpack else (layer.load_state_dict(state), layer(torch.eye(7)))


def test_the_table_has_the_bytes_of_the_stream():
    entry = LayerEntry.of_codes(CodeFormat(bits=8, group_size=7, scale_bits=6), -5, 31)
    written = entry.model_dump(exclude_none=True)
    assert written == {"bits": 8, "group_size": 7, "scale_bits": 6, "scale_exponent": -5, "coded_bytes": 31}
    assert read_entries({"q": written}, 3) == {"q": entry}
    for wrong in ({"bits": 4}, {"coded_bytes": 0}, {"coded_bytes": 2.0}, {"coded_bytes": True}):
        with pytest.raises(CheckpointFormatError, match="layer 'q'"):
            read_entries({"q": written | wrong}, 3)
    with pytest.raises(CheckpointFormatError, match="layer 'q'"):
        read_entries({"q": {"nnz": 4, "coded_bytes": 3}}, 3)


@pytest.mark.parametrize("n", [1, 4096, 100_001])
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 4.0, 25.0])
def test_expected_bytes_are_those_of_the_stream(n, scale):
    generator = torch.Generator().manual_seed(n)
    codes = (torch.randn(n, 1, generator=generator) * scale).round().clamp(-127, 127).to(torch.int8)
    size = coded_bytes(codes)
    assert abs(expected_bytes(codes) - size) <= 0.01 * size + 40
