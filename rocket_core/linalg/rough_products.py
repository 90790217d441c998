"""Products of float32 matrices in the precision of bfloat16, for iterations that correct their own errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


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


@cache
def _has_tiles() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))
