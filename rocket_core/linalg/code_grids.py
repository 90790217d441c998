"""What rounding needs to know of a format: where the entries of a rounded weight can be."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """What codes can be.

    Attributes:
        least: the smallest.
        largest: the largest.
        table: all of them, ascending, if they are not consecutive integers.
    """

    least: int
    largest: int
    table: tuple[int, ...] | None = None

    @classmethod
    def of(cls, levels: tuple[int, ...]) -> "Levels":
        """Return levels, given in ascending order."""
        consecutive = len(levels) == levels[-1] - levels[0] + 1
        return cls(least=levels[0], largest=levels[-1], table=None if consecutive else levels)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that codes are kept in."""
        return torch.int8 if max(-self.least - 1, self.largest) < 2**7 else torch.int32

    def nearest(self, parts: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Round parts of a step to codes; returns a new tensor."""
        return self.nearest_(parts.clone())

    def nearest_(self, parts: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Round parts of a step to codes, in place."""
        if self.table is None:
            return parts.round_().clamp_(self.least, self.largest)
        table = torch.tensor(self.table, dtype=parts.dtype, device=parts.device)
        return parts.copy_(table[torch.bucketize(parts.contiguous(), (table[1:] + table[:-1]) / 2)])


_SelfT = TypeVar("_SelfT")


@runtime_checkable
class RoundedCodes(Protocol):
    """A rounded weight."""

    @property
    def codes(self) -> Int[Tensor, "d_in d_out"]:
        """What each entry is rounded to, in steps."""

    @property
    def scales(self) -> Any:
        """The grid of the entries: a `Grid` of this kind of rounded weight."""

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return the rounded weight."""

    def replaced(self: _SelfT, other: _SelfT, outputs: Bool[Tensor, " d_out"]) -> _SelfT:
        """Return this weight with some outputs of another one."""


RoundedT = TypeVar("RoundedT", bound=RoundedCodes)
RoundedT_co = TypeVar("RoundedT_co", bound=RoundedCodes, covariant=True)


@runtime_checkable
class Grid(Protocol[RoundedT_co]):
    """Points step_ij · code - offset_ij that the entries of a weight are rounded to."""

    @property
    def levels(self) -> Levels:
        """What codes can be."""

    def by_input(self, d_in: int, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return the step of every entry, which is not zero."""

    def shifted(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """Return a weight plus the offsets, of which codes are rounded parts; may be the weight itself."""

    def rounded(self, codes: Int[Tensor, "d_in d_out"]) -> RoundedT_co:
        """Return the weight with these codes."""
