import pytest
import torch

from rocket_core.linalg.blocked_factors import BLOCK, factor_in_place, invert_in_place, invert_triangle_in_place


def gram(n, dtype=torch.float64):
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return rows.mT @ rows / n + 0.1 * torch.eye(n, dtype=dtype)


@pytest.mark.parametrize("n", [1, 7, 4 * BLOCK - 1, 4 * BLOCK, 5 * BLOCK + 13])
def test_factor_and_inverse_are_those_of_lapack(n):
    matrix = gram(n)
    found = matrix.clone()
    assert factor_in_place(found)
    torch.testing.assert_close(found, torch.linalg.cholesky(matrix), rtol=1e-10, atol=1e-12)
    invert_in_place(found)
    torch.testing.assert_close(found, torch.linalg.inv(matrix), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("n", [1, 7, 4 * BLOCK, 5 * BLOCK + 13])
def test_the_inverse_of_a_triangle_is_a_triangle(n):
    factor = torch.linalg.cholesky(gram(n))
    found = factor.clone()
    invert_triangle_in_place(found)
    assert not found.triu(1).any()
    torch.testing.assert_close(found @ factor, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-10)


def test_float32_loses_as_little_as_lapack():
    matrix = gram(5 * BLOCK, torch.float32)
    exact = torch.linalg.inv(matrix.double())
    found = matrix.clone()
    assert factor_in_place(found)
    invert_in_place(found)
    lapack = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    assert (found - exact).norm() < 3 * (lapack - exact).norm()


@pytest.mark.parametrize("n", [7, 5 * BLOCK])
@pytest.mark.parametrize("at", [0, -1])
def test_a_matrix_that_is_not_positive_definite_is_recognized(n, at):
    matrix = gram(n)
    matrix[at, at] = -1
    assert not factor_in_place(matrix)


def test_results_repeat_to_the_byte():
    first, second = (gram(4 * BLOCK, torch.float32) for _ in range(2))
    for matrix in (first, second):
        assert factor_in_place(matrix)
        invert_in_place(matrix)
    assert torch.equal(first, second)
