"""Gradients scaled by a power of two, so that a narrow dtype can hold them."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# The largest float16 number is near 2^16, so gradients are scaled to about 2^4: they may grow 4000-fold within a block.
_LARGEST_HALF_EXPONENT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledGradient:
    """A gradient times a power of two, so that a narrow dtype can hold it.

    Attributes:
        values: the gradient of one batch times `2**exponent`, in the model's dtype.
        exponent: 0 except for float16.
    """

    values: Float[Tensor, "windows tokens hidden"]
    exponent: int

    def centred(self) -> "ScaledGradient":
        """Return the gradient scaled so that float16 neither overflows nor underflows; other dtypes stay unchanged."""
        if self.values.dtype != torch.float16:
            return self
        return _centred(self.values.float(), self.exponent)

    def added(self, other: "ScaledGradient") -> "ScaledGradient":
        """Return the sum of two gradients of one batch, whose exponents may differ."""
        if self.values.dtype != torch.float16:
            return ScaledGradient(values=self.values + other.values, exponent=self.exponent)
        exponent = min(self.exponent, other.exponent)
        return _centred(self.at(exponent) + other.at(exponent), exponent)

    def at(self, exponent: int) -> Float[Tensor, "windows tokens hidden"]:
        """Return the gradient times `2**exponent`, in float32 if the model's dtype is float16."""
        if self.values.dtype != torch.float16:
            return self.values
        # No shift exceeds the range of float32.
        return self.values.float() * 2.0 ** (exponent - self.exponent)


def _centred(values: Float[Tensor, "windows tokens hidden"], exponent: int) -> ScaledGradient:
    largest = float(values.abs().max())
    if largest == 0.0 or not math.isfinite(largest):
        return ScaledGradient(values=values.half(), exponent=exponent)
    shift = _LARGEST_HALF_EXPONENT - math.frexp(largest)[1]
    return ScaledGradient(values=(values * 2.0**shift).half(), exponent=exponent + shift)
