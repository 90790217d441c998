"""One small stored layer of each kind, and its dense weight."""

import torch

from rocket_core.layers import FactorizedLinear, LayerFactors, SparseLinear, layer_tensors

D_IN, RANK, D_OUT = 7, 11, 5

KINDS = ("factored", "low rank", "follower", "sparse", "full")
"""Low rank and full are the same as factored and sparse with every coefficient stored."""


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


def dense_weight(factors):
    """Return the weight as `nn.Linear` has it, in float64."""
    coefficients = factors.coefficients.double()
    return (coefficients if factors.dictionary is None else factors.dictionary.double() @ coefficients).T


def make_layer(kind="factored", dtype=torch.float32, *, bias=True, dictionary_owner=None, seed=3):
    """Return a packed layer and its dense weight in float64; a follower gets a new owner unless given one."""
    factors = make_factors(kind, dtype, seed)
    tensors = layer_tensors(factors, dtype)
    if bias:
        tensors["bias"] = torch.linspace(-1, 1, D_OUT, dtype=dtype)
    options = {"nnz": tensors["weight"].numel(), "bias": bias, "dtype": dtype}
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
