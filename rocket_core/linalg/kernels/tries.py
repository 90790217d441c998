"""Scales that a search tries."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tries:
    """Descending scales, of which a search tries some consecutive ones for each group of a weight.

    Attributes:
        unit: the largest scale.
        per_octave: scales in an octave.
        last: place of the smallest scale; infinite without one.
        count: scales to try.
        half: codes are from -half to half - 1.
        positive: whether only positive scales are tried, instead of both signs.
    """

    unit: float
    per_octave: int
    last: float
    count: int
    half: int
    positive: bool

    def scales(self, places: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the magnitudes of the scales at some places."""
        return self.unit * torch.exp2(-places.clamp_max(self.last) / self.per_octave)
