import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.errors import InvalidConfigError
from rocket_core.layers import LayerFactors, approximation, compose_weight, layer_tensors
from rocket_core.sizes import budget
from tests.reference.stored_layers import (
    ALL_KINDS,
    KINDS,
    QUANTIZED,
    dense_weight,
    make_coefficients,
    make_factors,
    make_rounded,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_composed_weight_is_the_exact_product_rounded_once(dtype):
    # Small integers: float32 is exact, a product in half precision is not.
    generator = torch.Generator().manual_seed(0)
    dictionary = torch.randint(-15, 16, (40, 30), generator=generator).to(dtype)
    coefficients = torch.randint(-15, 16, (30, 20), generator=generator).to(dtype)
    exact = (dictionary.double() @ coefficients.double()).T
    assert torch.equal(compose_weight(dictionary, coefficients, dtype), exact.to(dtype))


def test_half_precision_factors_are_multiplied_exactly():
    dictionary, coefficients = torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[1.0], [2**-12]]).bfloat16()
    assert compose_weight(dictionary, coefficients, torch.float32).item() == 1 + 2**-12


def test_float64_factors_are_composed_in_float64():
    dictionary, coefficients = torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[1.0], [1e-12]]).double()
    assert compose_weight(dictionary, coefficients, torch.float64).item() == 1.0 + 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_composed_weight_is_independent_of_memory_layout(dtype):
    generator = torch.Generator().manual_seed(0)
    dictionary = torch.randn(129, 77, generator=generator).to(dtype)
    coefficients = torch.randn(77, 93, generator=generator).to(dtype)
    unaligned = torch.empty(coefficients.numel() + 1, dtype=dtype)[1:].view(77, 93).copy_(coefficients)
    weight = compose_weight(dictionary, coefficients, dtype)
    assert torch.equal(compose_weight(dictionary.T.contiguous().T, coefficients.T.contiguous().T, dtype), weight)
    assert torch.equal(compose_weight(dictionary, unaligned, dtype), weight)


def test_without_dictionary_coefficients_are_rounded_and_copied():
    coefficients = torch.tensor([[1 + 2**-12, 2.0, 3.0]], dtype=torch.float64)
    weight = compose_weight(None, coefficients, torch.bfloat16)
    assert weight.tolist() == [[1.0], [2.0], [3.0]]
    same = compose_weight(None, coefficients, torch.float64)
    assert torch.equal(same, compose_weight(torch.ones(1, 1, dtype=torch.float64), coefficients, torch.float64))
    same.zero_()
    assert coefficients.tolist() == [[1 + 2**-12, 2.0, 3.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_composes_to_its_weight(kind):
    factors = make_factors(kind, torch.float64)
    weight = compose_weight(factors.dictionary, factors.coefficients, torch.float64)
    torch.testing.assert_close(weight, dense_weight(factors), rtol=1e-14, atol=1e-14)
    assert factors.shape == tuple(reversed(weight.shape))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_approximation_is_the_weight_of_the_kind(kind):
    factors = make_rounded(QUANTIZED[kind]) if kind in QUANTIZED else make_factors(kind, torch.float64)
    weight = approximation(factors, torch.float64)
    torch.testing.assert_close(weight, dense_weight(factors).T, rtol=1e-14, atol=1e-14)
    assert weight.shape == factors.shape


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("factored", {"weight", "weight_mask", "weight_u"}),
        ("low rank", {"weight", "weight_u"}),
        ("follower", {"weight", "weight_mask"}),
        ("sparse", {"weight", "weight_mask"}),
        ("full", {"weight", "weight_mask"}),
    ],
)
def test_stored_tensors_match_the_kind(kind, parts):
    tensors = layer_tensors(make_factors(kind), torch.bfloat16)
    assert tensors.keys() == parts
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        name: torch.uint8 if name == "weight_mask" else torch.bfloat16 for name in parts
    }


@given(
    d_in=st.integers(1, 20),
    rank=st.integers(1, 20),
    d_out=st.integers(1, 12),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=200, deadline=None)
def test_the_bytes_formula_equals_the_stored_bytes(d_in, rank, d_out, density, seed, dtype):
    def stored(factors):
        return sum(tensor.nbytes for tensor in layer_tensors(factors, dtype).values())

    size = dtype.itemsize
    coefficients, support = make_coefficients(rank, d_out, density, seed)
    own = LayerFactors(dictionary=torch.ones(d_in, rank), coefficients=coefficients, support=support)
    nnz = int(support.sum())
    assert stored(own) == budget.factored_bytes(d_in, d_out, rank, nnz, size)
    shared = LayerFactors(
        dictionary=own.dictionary, coefficients=coefficients, support=support, dictionary_owner="dictionary_owner"
    )
    assert stored(shared) == budget.coefficient_bytes(d_out, rank, nnz, size)
    assert stored(own) - stored(shared) == budget.dictionary_bytes(d_in, rank, size)

    weight, support = make_coefficients(d_in, d_out, density, seed)
    sparse = LayerFactors(dictionary=None, coefficients=weight, support=support)
    assert stored(sparse) == budget.sparse_bytes(d_in, d_out, int(support.sum()), size)


def test_a_dictionary_owner_without_its_dictionary_is_refused():
    with pytest.raises(InvalidConfigError, match="q_proj"):
        LayerFactors(dictionary=None, coefficients=torch.ones(2, 2), dictionary_owner="q_proj")
