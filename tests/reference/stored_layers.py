"""One small stored layer of each kind, and its dense weight."""

import torch

from rocket_core.layers import FactorizedLinear, LayerFactors, QuantizedLinear, SparseLinear, layer_tensors
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes.code_format import CodeFormat

D_IN, RANK, D_OUT = 7, 11, 5

KINDS = ("factored", "low rank", "follower", "sparse", "full")
"""Low rank and full are the same as factored and sparse with every coefficient stored."""

QUANTIZED = {
    "int4": CodeFormat(bits=4, group_size=3, scale_bits=6),
    "int3": CodeFormat(bits=3, group_size=2, scale_bits=16),
    "int8": CodeFormat(bits=8, group_size=7, scale_bits=8),
}
ALL_KINDS = (*KINDS, *QUANTIZED)

EXPONENT = -5
"""Exponent of the scales of quantized layers."""


def make_coefficients(rank, d_out, density, seed, dtype=torch.float32):
    """Return random coefficients on a random support with exact zeros and, by chance, empty rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    support = torch.rand(rank, d_out, generator=generator) < density
    coefficients = torch.randn(rank, d_out, generator=generator, dtype=torch.float64)
    coefficients[torch.rand(rank, d_out, generator=generator) < 0.2] = 0
    return (coefficients * support).to(dtype), support


def make_factors(kind, dtype=torch.float32, seed=3):
    """Return factors of a `D_IN` x `D_OUT` layer; a follower's owner is called `dictionary_owner`."""
    dictionary = None
    if kind in ("factored", "low rank", "follower"):
        dictionary = torch.randn(D_IN, RANK, generator=torch.Generator().manual_seed(4)).to(dtype)
    rows = D_IN if dictionary is None else RANK
    coefficients, support = make_coefficients(rows, D_OUT, 1 if kind in ("low rank", "full") else 0.5, seed, dtype)
    dictionary_owner = "dictionary_owner" if kind == "follower" else None
    return LayerFactors(
        dictionary=dictionary, coefficients=coefficients, support=support, dictionary_owner=dictionary_owner
    )


def make_rounded(code_format, d_in=D_IN, d_out=D_OUT, seed=3, exponent=EXPONENT):
    """Return random codes and scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (code_format.bits - 1)
    codes = torch.randint(-half, half, (d_in, d_out), generator=generator, dtype=torch.int8)
    shape = code_format.groups(d_in), d_out
    if code_format.scale_bits == 16:
        scales = torch.randn(shape, generator=generator).half()
        scales[scales == 0] = 1
    else:
        scales = torch.randint(0, 2**code_format.scale_bits, shape, generator=generator, dtype=torch.uint8)
    return RoundedWeight(codes=codes, scales=Scales(codes=scales, exponent=exponent, format=code_format))


def rounded_weight(rounded):
    """Return the weight as `nn.Linear` has it, in float64, entry by entry from the documented formula."""
    scales, (d_in, d_out) = rounded.scales, rounded.codes.shape
    weight = torch.empty(d_out, d_in, dtype=torch.float64)
    for i in range(d_in):
        for j in range(d_out):
            stored = scales.codes[i // scales.format.group_size, j].item()
            if scales.format.scale_bits == 16:
                scale = 2**scales.exponent * stored
            else:
                sign, octave = {6: (32, 6), 8: (128, 12)}[scales.format.scale_bits]
                scale = 2 ** ((scales.exponent - stored % sign) / octave) * (-1) ** (stored // sign)
            weight[j, i] = rounded.codes[i, j].item() * scale
    return weight


def dense_weight(factors):
    """Return the weight as `nn.Linear` has it, in float64."""
    if isinstance(factors, RoundedWeight):
        return rounded_weight(factors)
    coefficients = factors.coefficients.double()
    return (coefficients if factors.dictionary is None else factors.dictionary.double() @ coefficients).T


def make_layer(kind="factored", dtype=torch.float32, *, bias=True, dictionary_owner=None, seed=3):
    """Return a packed layer and its dense weight in float64; a follower gets a new owner unless given one."""
    quantized = kind in QUANTIZED
    factors = make_rounded(QUANTIZED[kind], seed=seed) if quantized else make_factors(kind, dtype, seed)
    tensors = layer_tensors(factors, dtype)
    if bias:
        tensors["bias"] = torch.linspace(-1, 1, D_OUT, dtype=dtype)
    options = {"bias": bias, "dtype": dtype}
    if quantized:
        layer = QuantizedLinear(D_IN, D_OUT, code_format=QUANTIZED[kind], scale_exponent=EXPONENT, **options)
        layer.load_state_dict(tensors)
        return layer, dense_weight(factors)
    options["nnz"] = tensors["weight"].numel()
    if factors.dictionary is None:
        layer = SparseLinear(D_IN, D_OUT, **options)
    else:
        if kind == "follower":
            options["dictionary_owner"] = dictionary_owner or make_layer("factored", dtype, seed=5)[0]
        layer = FactorizedLinear(D_IN, D_OUT, rank=RANK, **options)
    layer.load_state_dict(tensors)
    return layer, dense_weight(factors)


def make_group(dtype=torch.float32, *, followers=2):
    """Return an owner and its followers, unpacked, and the dense weights of all in float64."""
    owner, weight = make_layer("factored", dtype)
    made = [make_layer("follower", dtype, dictionary_owner=owner, seed=10 + index) for index in range(followers)]
    return [each.unpack_() for each in (owner, *(layer for layer, _ in made))], [weight, *(dense for _, dense in made)]


def as_tensors(state):
    """Return an independent copy of a state dict."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}
