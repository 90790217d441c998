import pytest
import torch

from rocket_core.linalg import rough_products as module
from rocket_core.linalg.rough_products import fast_products, multiply_roughly, rough_factor, rough_products


@pytest.fixture
def capabilities(monkeypatch):
    """Return what the CPU reports, to be changed."""
    found = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    for cached in (module._multiplies_fast, module._is_exact_in_onednn):
        cached.cache_clear()
    yield found
    for cached in (module._multiplies_fast, module._is_exact_in_onednn):
        cached.cache_clear()


@pytest.mark.parametrize("instructions", ["amx_bf16", "avx512_bf16"])
def test_factors_are_rounded_with_instructions_for_it(capabilities, instructions):
    capabilities[instructions] = True
    left, right = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    product = multiply_roughly(left, rough_factor(right))
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.float(), left @ right, rtol=0.02, atol=0.05)


def test_factors_are_not_rounded_without_instructions_for_it(capabilities):
    capabilities["avx512_f"] = True
    matrix = torch.eye(3)
    assert rough_factor(matrix) is matrix


def test_double_precision_is_never_rounded(capabilities):
    capabilities["amx_bf16"] = True
    assert rough_factor(torch.eye(3, dtype=torch.float64)).dtype == torch.float64


def test_the_precision_of_products_is_restored():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with rough_products():
        pass
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_products_of_bfloat16_values_lose_nothing():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 96, generator=generator).bfloat16().float()
    with rough_products():
        product = rows.T @ rows
    exact = (rows.double().T @ rows.double()).float()
    torch.testing.assert_close(product, exact, rtol=1e-5, atol=1e-4)


def test_other_products_are_within_the_precision_of_bfloat16():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(96, 96, generator=generator) for _ in range(2))
    with rough_products():
        product = left @ right
    error = torch.linalg.matrix_norm(product - left @ right) / torch.linalg.matrix_norm(left @ right)
    assert error < 0.01


AMD = {"cpu_name": "AMD EPYC", "avx512_bf16": True}


@pytest.mark.parametrize(
    ("reported", "error", "expected"),
    [
        (AMD, 5e-7, "bf16"),
        (AMD, 3e-3, None),
        (AMD | {"amx_bf16": True}, 5e-7, None),
        (AMD | {"cpu_name": "Intel Xeon"}, 5e-7, None),
        ({"cpu_name": "AMD EPYC"}, 5e-7, None),
    ],
    ids=["faster", "rounds", "tiles", "not AMD", "no instructions"],
)
def test_onednn_multiplies_only_where_it_is_exact(capabilities, monkeypatch, reported, error, expected):
    capabilities |= reported
    monkeypatch.setattr(module, "_error_of_rough_products", lambda: error)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with fast_products():
        assert torch.backends.mkldnn.matmul.fp32_precision == (expected or before)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_products_are_exact_to_float32_in_any_case():
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(300, 300, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    with fast_products():
        found = left @ right
    assert torch.linalg.matrix_norm(found - exact) < 1e-5 * torch.linalg.matrix_norm(exact)
