import torch

from rocket_core.linalg.rough_products import rough_products


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
