"""A Gram matrix with what pruning and rounding derive from it, computed once for all layers that read the input."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.least_squares import UnitGram
from rocket_core.linalg.rounding import RoundingGram


@dataclass(frozen=True, kw_only=True)
class PreparedGram:
    """A Gram matrix and what is derived from it on request.

    Attributes:
        matrix: G, after shrinkage, in the computing precision.
    """

    matrix: Float[Tensor, "n n"]

    @cached_property
    def unit(self) -> UnitGram:
        """The matrix for inputs of unit length, for pruning."""
        return UnitGram.of(self.matrix)

    @cached_property
    def rounding(self) -> RoundingGram:
        """The damped matrix, for rounding."""
        return RoundingGram.of(self.matrix)
