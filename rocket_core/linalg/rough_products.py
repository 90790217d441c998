"""Products of float32 matrices in the precision of bfloat16, for iterations that correct their own errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor


@contextmanager
def rough_products() -> Iterator[None]:
    """Round the factors of float32 products to bfloat16 on a CPU that multiplies those many times as fast.

    Sums stay in float32. Other CPUs and accelerators compute as before.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch adds it when it is imported
    before = settings.fp32_precision
    if _has_tiles():
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def rough_factor(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return a float32 matrix in bfloat16 on a CPU that multiplies this many times as fast, else the matrix itself.

    This is for one factor of many products; see `multiply_roughly`. A product is then rounded to bfloat16 as well.
    """
    return (
        matrix.bfloat16() if matrix.dtype == torch.float32 and matrix.device.type == "cpu" and _has_tiles() else matrix
    )


def multiply_roughly(left: Float[Tensor, "rows n"], factor: Float[Tensor, "n n"]) -> Float[Tensor, "rows n"]:
    """Return the product with a rough factor, in the factor's dtype."""
    return left.to(factor.dtype) @ factor


@cache
def _has_tiles() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))
