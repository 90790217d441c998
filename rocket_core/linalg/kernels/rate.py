"""What the bits of entropy-coded codes cost."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

LARGEST_CODE = 127
"""Entropy-coded codes are within ±127."""


def occurrences(values: UInt8[Tensor, " n"], size: int) -> Int64[Tensor, " size"]:
    """Return how often each number below `size` occurs among values that all are below it."""
    if values.device.type == "cpu":
        return torch.bincount(values, minlength=size)
    # Elsewhere bincount waits for the largest value.
    return torch.histc(values.int(), bins=size, min=0, max=size).long()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What bits cost.

    Attributes:
        lengths: bits of each code from -127 to 127.
        worth: error that a bit is worth for each column, in its squared steps.
    """

    lengths: Float[Tensor, "255"]
    worth: Float[Tensor, " columns"]
