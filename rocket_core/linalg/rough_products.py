"""Products of float32 matrices in the precision of bfloat16, for iterations that correct their own errors."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_CPU = torch.device("cpu")
# Rounding to bfloat16 leaves a relative error of some thousandths, float32 one of some ten millionths.
_FLOAT32_ERROR, _PROBED = 1e-5, 256


def rough_products(device: torch.device = _CPU) -> AbstractContextManager[None]:
    """Allow to round the factors of float32 products, to bfloat16 on a CPU that multiplies those several times as fast.

    Sums stay in float32. CPUs with tiles do round; those that only have vector instructions for bfloat16 compute in
    float32, some of them faster than otherwise. GPUs with TF32 round to its 11 bits, of which bfloat16 has 8. Other
    CPUs and accelerators compute as before.
    """
    if device.type == "cpu":
        return _rounding_allowed(torch.backends.mkldnn, "bf16", when=_multiplies_fast())
    backend = getattr(torch.backends, device.type, None)
    return _rounding_allowed(backend, "tf32", when=hasattr(backend, "matmul"))


def fast_products() -> AbstractContextManager[None]:
    """Multiply float32 matrices with oneDNN on CPUs where that is exact and faster than MKL, on which torch relies.

    These are AMD's with AVX-512 instructions for bfloat16, on which MKL uses half of the vectors' width. torch takes
    oneDNN where it may round to bfloat16, which oneDNN does with tiles only; that it does not is checked once. As sums
    have another order, this is for what only a run computes, not for evaluating or healing an artifact.
    """
    return _rounding_allowed(torch.backends.mkldnn, "bf16", when=_is_exact_in_onednn())


@contextmanager
def _rounding_allowed(backend: Any, precision: str, *, when: bool) -> Iterator[None]:
    """Allow a library to round the factors of float32 products, which makes torch take oneDNN instead of MKL."""
    if not when:
        yield
        return
    settings = backend.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def rough_factor(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return a float32 matrix in bfloat16 on a CPU that multiplies these several times as fast, else the matrix itself.

    This is for one factor of many products; see `multiply_roughly`. A product is then rounded to bfloat16 as well.
    """
    rounds = matrix.dtype == torch.float32 and matrix.device.type == "cpu" and _multiplies_fast()
    return matrix.bfloat16() if rounds else matrix


def multiply_roughly(left: Float[Tensor, "rows n"], factor: Float[Tensor, "n n"]) -> Float[Tensor, "rows n"]:
    """Return the product with a rough factor, in the factor's dtype."""
    return left.to(factor.dtype) @ factor


@cache
def _multiplies_fast() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


@cache
def _is_exact_in_onednn() -> bool:
    """Return whether oneDNN is the faster library on this CPU, and computes in float32 where it may round."""
    capabilities = torch.cpu.get_capabilities()
    known = "AMD" in str(capabilities.get("cpu_name", "")) and capabilities.get("avx512_bf16", False)
    return bool(known) and not capabilities.get("amx_bf16", False) and _error_of_rough_products() < _FLOAT32_ERROR


def _error_of_rough_products() -> float:
    """Return the relative error of a product of float32 matrices that may be rounded."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_PROBED, _PROBED, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    with rough_products():
        found = left @ right
    return float((found - exact).norm() / exact.norm())
