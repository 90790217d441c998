"""What the bits of entropy-coded codes cost."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

LARGEST_CODE = 127
"""Entropy-coded codes are within ±127."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What bits cost.

    Attributes:
        lengths: bits of each code from -127 to 127.
        worth: error that a bit is worth for each column, in its squared steps.
    """

    lengths: Float[Tensor, "255"]
    worth: Float[Tensor, " columns"]
