"""Cholesky factors and inverses of large matrices, mostly by matrix products.

LAPACK reaches a half of the speed of a product in a factorization. In blocks, nearly all operations are products, and
one matrix is held where LAPACK's inverse takes two.
"""

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 256
"""Rows that are factored at once."""

# Smaller matrices are left to LAPACK.
_LEAST = 4 * BLOCK
# Rows of an inverse that are computed by one product, in units of a block.
_WIDE = 4


def factor_in_place(matrix: Float[Tensor, "n n"]) -> bool:
    """Replace a symmetric matrix by its lower Cholesky factor; what is above the diagonal becomes zero.

    Args:
        matrix: only its lower triangle is read.

    Returns:
        Whether the matrix is positive definite; otherwise its content is lost.
    """
    n = len(matrix)
    if n < _LEAST or matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(factor)
        return int(info) == 0
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        panel = matrix[start:, start:stop]
        if start:
            panel -= matrix[start:, :start] @ matrix[start:stop, :start].mT
        head, info = torch.linalg.cholesky_ex(panel[: stop - start])
        if int(info) != 0:
            return False
        panel[: stop - start] = head
        panel[stop - start :] = panel[stop - start :] @ _triangle_inverse(head).mT
        matrix[start:stop, stop:] = 0
    return True


def invert_in_place(factor: Float[Tensor, "n n"]) -> None:
    """Replace a lower Cholesky factor L by the inverse of LLᵀ.

    Args:
        factor: L, with zeros above the diagonal.
    """
    n = len(factor)
    if n < _LEAST or factor.device.type != "cpu":
        factor.copy_(torch.cholesky_inverse(factor))
        return
    invert_triangle_in_place(factor)
    # The inverse is L⁻ᵀL⁻¹; its rows from the first on need no rows before them.
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        factor[start:stop, :stop] = factor[start:, start:stop].mT @ factor[start:, :stop]
        factor[:start, start:stop] = factor[start:stop, :start].mT


def invert_triangle_in_place(factor: Float[Tensor, "n n"]) -> None:
    """Replace a lower triangular matrix by its inverse.

    Args:
        factor: the matrix, with zeros above the diagonal.
    """
    n = len(factor)
    if n < _LEAST or factor.device.type != "cpu":
        factor.copy_(_triangle_inverse(factor))
        return
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        inverse = _triangle_inverse(factor[start:stop, start:stop])
        rows = inverse @ factor[start:stop, :start]
        factor[start:stop, start:stop] = inverse
        for begin in range(0, start, _WIDE * BLOCK):
            end = min(begin + _WIDE * BLOCK, start)
            factor[start:stop, begin:end] = -(rows[:, begin:] @ factor[begin:start, begin:end])


def _triangle_inverse(factor: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    ones = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, ones, upper=False)
    return inverse
