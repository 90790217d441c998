"""A Gram matrix with what pruning and rounding derive from it, computed once for all layers that read the input."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.least_squares import UnitGram
from rocket_core.linalg.rounding import RoundingGram


@dataclass(kw_only=True, slots=True)
class PreparedGram:
    """A Gram matrix and what is derived from it on request.

    Attributes:
        matrix: G, after shrinkage, in the computing precision.
    """

    matrix: Float[Tensor, "n n"]
    _unit: UnitGram | None = field(default=None, repr=False)
    _rounding: RoundingGram | None = field(default=None, repr=False)

    @property
    def unit(self) -> UnitGram:
        """The matrix for inputs of unit length, for pruning."""
        if self._unit is None:
            self._unit = UnitGram.of(self.matrix)
        return self._unit

    @property
    def rounding(self) -> RoundingGram:
        """The damped matrix, for rounding."""
        if self._rounding is None:
            self._rounding = RoundingGram.of(self.matrix)
        return self._rounding
