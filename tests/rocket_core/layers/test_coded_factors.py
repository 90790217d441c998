"""Layers made of coefficients whose numbers are integer codes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.layers import (
    CodedFactorizedLinear,
    CodedSparseLinear,
    LayerFactors,
    ValueCodes,
    coded_entry,
    layer_tensors,
    read_entries,
    round_values,
)
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.stored_layers import D_IN, D_OUT, KINDS, RANK, make_factors

KINDS_OF_CODES = [(kind, bits) for kind in KINDS for bits in (4, 8)]


def numbers_of(packed, scale_bytes, shape, bits, exponent):
    """Decode by the documented format alone: bits of a stream, scales of 8 bits for groups of 32."""
    inputs, outputs = shape
    groups = -(-inputs // 32)

    def integer(data, width, n):
        stream = int.from_bytes(bytes(data.tolist()), "little")
        return (stream >> (n * width)) % 2**width

    weight = torch.empty(outputs, inputs, dtype=torch.float64)
    for j in range(outputs):
        for i in range(inputs):
            stored = integer(scale_bytes, 8, j * groups + i // 32)
            scale = 2 ** ((exponent - stored % 128) / 12) * (-1) ** (stored // 128)
            weight[j, i] = (integer(packed, bits, j * inputs + i) - 2 ** (bits - 1)) * scale
    return weight


def expected_weight(factors, tensors, entry, owner):
    """Return the dense weight in float64, from the tensors on disk."""
    support = factors.support
    rows = torch.zeros(D_OUT, factors.coefficients.shape[0], dtype=torch.float64)
    mask = torch.ones_like(rows, dtype=torch.bool) if support is None else support.T
    values = numbers_of(tensors["weight"], tensors["weight_scale"], (entry.nnz, 1), entry.bits, entry.scale_exponent)
    rows[mask] = values[0]
    if factors.dictionary is None:
        return rows
    owned, own_entry = owner or (tensors, entry)
    shape = (RANK, D_IN)
    atoms = numbers_of(owned["weight_u"], owned["weight_u_scale"], shape, entry.bits, own_entry.dictionary_exponent)
    return rows @ atoms.T


def layer_of(kind, bits, dtype=torch.float32, seed=3):
    """Return a packed layer with a bias and its dense weight."""
    factors = round_values(make_factors(kind, dtype, seed), bits, (D_OUT,))
    tensors, entry = layer_tensors(factors, dtype), coded_entry(factors)
    bias = torch.linspace(-1, 1, D_OUT, dtype=dtype)
    options = {"nnz": entry.nnz, "bias": True, "dtype": dtype}
    options["codes_of"] = ValueCodes(
        format=entry.code_format, exponent=entry.scale_exponent, dictionary_exponent=entry.dictionary_exponent
    )
    owner = None
    if kind == "follower":
        owning = round_values(make_factors("factored", dtype, 5), bits, (D_OUT,))
        owner = layer_tensors(owning, dtype), coded_entry(owning)
        options["dictionary_owner"] = layer_of("factored", bits, dtype, seed=5)[0]
    if factors.dictionary is None:
        layer = CodedSparseLinear(D_IN, D_OUT, **options)
    else:
        layer = CodedFactorizedLinear(D_IN, D_OUT, rank=RANK, **options)
    layer.load_state_dict(tensors | {"bias": bias})
    return layer, expected_weight(factors, tensors, entry, owner)


@pytest.mark.parametrize(("kind", "bits"), KINDS_OF_CODES)
@pytest.mark.parametrize("unpacked", [False, True])
def test_a_layer_computes_what_its_bytes_mean(kind, bits, unpacked):
    layer, weight = layer_of(kind, bits)
    if unpacked:
        layer.unpack_()
    inputs = torch.randn(6, D_IN, generator=torch.Generator().manual_seed(1))
    expected = functional.linear(inputs.double(), weight, layer.bias.double())
    torch.testing.assert_close(layer(inputs).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.dense_weight().double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "bits"), KINDS_OF_CODES)
def test_numbers_are_within_half_a_step(kind, bits):
    before = make_factors(kind)
    after = round_values(before, bits, (D_OUT,))
    [values] = after.value_codes
    assert torch.equal(after.support, before.support)
    stored = before.support.T
    wanted, given = before.coefficients.T[stored], after.coefficients.T[stored]
    steps = values.scales.by_input(len(wanted), torch.float32)[:, 0].abs()
    half = 2 ** (bits - 1)
    # Numbers beyond the codes' range are clipped to it.
    inside = (wanted / steps).abs() <= half - 1
    assert ((wanted - given).abs()[inside] <= 0.5001 * steps[inside]).all()
    assert torch.equal(given, values.rows(torch.float32)[0])
    assert not after.coefficients.T[~stored].any()


def test_layers_that_share_a_dictionary_have_their_own_codes():
    parts = [make_factors("factored", seed=seed) for seed in (3, 8)]
    together = LayerFactors(
        dictionary=parts[0].dictionary,
        coefficients=torch.cat([part.coefficients for part in parts], dim=1),
        support=torch.cat([part.support for part in parts], dim=1),
    )
    rounded = round_values(together, 4, (D_OUT, D_OUT))
    for index, part in enumerate(parts):
        alone = round_values(part, 4, (D_OUT,))
        assert torch.equal(rounded.value_codes[index].codes, alone.value_codes[0].codes)
        assert torch.equal(rounded.coefficients[:, index * D_OUT : (index + 1) * D_OUT], alone.coefficients)
    assert torch.equal(rounded.dictionary, alone.dictionary)


@pytest.mark.parametrize(("kind", "bits"), KINDS_OF_CODES)
def test_state_dicts_have_the_bytes_of_the_disk(kind, bits):
    layer, weight = layer_of(kind, bits)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert all(saved[name].dtype == torch.uint8 for name in saved if name != "bias")
    layer.unpack_()
    again = layer.state_dict()
    assert list(again) == list(saved)
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    other, _ = layer_of(kind, bits, seed=3)
    other.unpack_().load_state_dict(saved)
    assert torch.equal(other.dense_weight(), layer.dense_weight())
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied.dense_weight().double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "bits"), KINDS_OF_CODES)
def test_a_cast_layer_decodes_anew(kind, bits):
    packed, weight = layer_of(kind, bits)
    unpacked, _ = layer_of(kind, bits)
    if kind == "follower":
        packed.dictionary_owner.double()
        unpacked.dictionary_owner.unpack_().double()
    for layer in (packed.double(), unpacked.unpack_().double()):
        assert layer.dtype == torch.float64
        assert layer.weight.dtype == (torch.uint8 if layer.packed else torch.float64)
        torch.testing.assert_close(layer.dense_weight(), weight, rtol=1e-12, atol=1e-14)


def test_codes_have_no_gradients_but_inputs_do():
    layer, weight = layer_of("factored", 8)
    inputs = torch.randn(2, D_IN, requires_grad=True)
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad.double(), weight.sum(dim=0).expand(2, -1), rtol=1e-5, atol=1e-5)
    assert [name for name, parameter in layer.named_parameters() if parameter.requires_grad] == ["bias"]


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_mask", "weight_u", "weight_u_scale"])
def test_damaged_tensors_are_refused(part):
    layer, _ = layer_of("factored", 4)
    state = layer.state_dict()
    parameter = getattr(layer, part)
    with torch.no_grad():
        if part == "weight_mask":
            parameter[0, 0] ^= 1
        else:
            setattr(layer, part, torch.nn.Parameter(state[part][:-1].clone(), requires_grad=False))
    with pytest.raises(CorruptCheckpointError):
        layer(torch.zeros(1, D_IN))


CODES = {"bits": 4, "group_size": 32, "scale_bits": 8, "scale_exponent": -3}


@pytest.mark.parametrize(
    "entry",
    [
        {"nnz": 5} | CODES | {"dictionary_exponent": 1},
        {"nnz": 5, "rank": 2} | CODES,
        {"nnz": 5, "rank": 2, "dictionary": "own", "dictionary_exponent": 1} | CODES,
        {"nnz": 5, "rank": 2, "dictionary_exponent": 1},
        {"nnz": 5, "rank": 2, "dictionary_exponent": 1201} | CODES,
        {"nnz": 5, "bits": 4, "group_size": 32},
        {"nnz": 5} | CODES | {"bits": 8, "coded_bytes": 5},
        {"nnz": 5, "rank": 2, "dictionary": "plain"} | CODES,
        {"nnz": 5, "rank": 2, "dictionary": "own"},
    ],
)
def test_inconsistent_entries_are_refused(entry):
    owners = {"own": {"nnz": 5, "rank": 2, "dictionary_exponent": 1} | CODES, "plain": {"nnz": 5, "rank": 2}}
    assert read_entries(owners | {"x": {"nnz": 5, "rank": 2, "dictionary": "own"} | CODES, "y": {"nnz": 5} | CODES}, 3)
    with pytest.raises(CheckpointFormatError):
        read_entries(owners | {"layer": entry}, 3)
    with pytest.raises(CheckpointFormatError, match="no bits"):
        read_entries({"own": owners["own"]}, 2)


def test_other_widths_load_as_well():
    factors = make_factors("sparse")
    rounded = round_values(factors, 4, (D_OUT,))
    [values] = rounded.value_codes
    wide = CodeFormat(bits=5, group_size=7, scale_bits=16)
    scales = replace(values.scales, codes=torch.ones(-(-factors.nnz // 7), 1).half(), exponent=0, format=wide)
    tensors = layer_tensors(replace(rounded, value_codes=(replace(values, scales=scales),)), torch.float32)
    layer = CodedSparseLinear(D_IN, D_OUT, nnz=factors.nnz, codes_of=ValueCodes(format=wide, exponent=0))
    layer.load_state_dict(tensors)
    assert torch.equal(layer.dense_weight()[factors.support.T], values.codes[:, 0].float())
