"""Weights under a block type: integer codes, and scales exactly as the type stores them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from rocket_core.linalg.code_grids import Levels
from rocket_core.sizes.block_types import BlockFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScales:
    """The scales of a weight, as they are stored; see `rocket_core.sizes.block_types` for their names.

    Attributes:
        block_scales: d, positive or negative, not zero.
        group_scales: s, not zero; 1 where the type has none.
        block_minima: e; None if the type has no minima.
        group_minima: m; None if the type has no minima, 1 where it has them for blocks only.
        format: the block type.
    """

    block_scales: Float[Tensor, "blocks d_out"]
    group_scales: Int8[Tensor, "groups d_out"]
    block_minima: Float[Tensor, "blocks d_out"] | None
    group_minima: Int8[Tensor, "groups d_out"] | None
    format: BlockFormat

    @property
    def levels(self) -> Levels:
        """What codes can be: levels, not their places in the table."""
        return Levels.of(self.format.levels)

    def steps(self, dtype: torch.dtype) -> Float[Tensor, "groups d_out"]:
        """Return d·s of every group, which float32 holds exactly."""
        return _products(self.block_scales, self.group_scales, self.format).to(dtype)

    def offsets(self, dtype: torch.dtype) -> Float[Tensor, "groups d_out"] | None:
        """Return what is subtracted from d·s·code of every group; None if the type has no minima.

        It is e·m, which float32 holds exactly, less d·s·shift.
        """
        if self.block_minima is None or self.group_minima is None:
            return None
        offsets = _products(self.block_minima, self.group_minima, self.format).to(dtype)
        return offsets - self.steps(dtype) * self.format.shift if self.format.shift else offsets

    def by_input(self, d_in: int, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return the step of every entry."""
        assert d_in == len(self.group_scales) * self.format.group_size
        return self.steps(dtype).repeat_interleave(self.format.group_size, dim=0)

    def shifted(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """Return a weight plus the offset of each entry."""
        offsets = self.offsets(weight.dtype)
        return weight if offsets is None else weight + offsets.repeat_interleave(self.format.group_size, dim=0)

    def rounded(self, codes: Int[Tensor, "d_in d_out"]) -> "BlockWeight":
        """Return the weight with these codes."""
        return BlockWeight(codes=codes, scales=self)

    @staticmethod
    def combined(parts: Sequence["BlockScales"], combine: Callable[[list[Tensor]], Tensor]) -> "BlockScales":
        """Return scales of one format, of whose tensors each is made from the same tensors of all parts."""
        tensors = {name: [getattr(part, name) for part in parts] for name in _TENSORS}
        present: dict[str, Any] = {name: combine(own) for name, own in tensors.items() if own[0] is not None}
        return replace(parts[0], **present)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWeight:
    """A weight w̃ = d·s·(code + shift) - e·m.

    Attributes:
        codes: a level of the type for each entry.
        scales: the scales.
    """

    codes: Int[Tensor, "d_in d_out"]
    scales: BlockScales

    @property
    def shape(self) -> tuple[int, int]:
        """`(d_in, d_out)` of the layer."""
        d_in, d_out = self.codes.shape
        return d_in, d_out

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "d_in d_out"]:
        """Return W̃."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        d_in, d_out = self.shape
        size = self.scales.format.group_size
        grouped = self.codes.view(-1, size, d_out).to(exact) * self.scales.steps(exact)[:, None]
        offsets = self.scales.offsets(exact)
        if offsets is not None:
            grouped -= offsets[:, None]
        return grouped.view(d_in, d_out).to(dtype)

    def rows(self, dtype: torch.dtype) -> Float[Tensor, "d_out d_in"]:
        """Return W̃ᵀ, in the orientation of `nn.Linear`, in row-major memory; in float32 what llama.cpp computes."""
        return self.weight(dtype).T.contiguous()

    @classmethod
    def of_parts(cls, parts: Sequence["BlockWeight"]) -> "BlockWeight":
        """Return the weight whose outputs are those of all parts."""
        return cls._combined(parts, lambda tensors: torch.cat(tensors, dim=1))

    def replaced(self, other: "BlockWeight", outputs: Bool[Tensor, " d_out"]) -> "BlockWeight":
        """Return this weight with some outputs of another one."""
        return self._combined([self, other], lambda tensors: torch.where(outputs, tensors[1], tensors[0]))

    @classmethod
    def _combined(cls, parts: Sequence["BlockWeight"], combine: Callable[[list[Tensor]], Tensor]) -> "BlockWeight":
        scales = BlockScales.combined([part.scales for part in parts], combine)
        return cls(codes=combine([part.codes for part in parts]), scales=scales)


def in_half(values: Float[Tensor, "*shape"], block_format: BlockFormat) -> Float[Tensor, "*shape"]:
    """Round scales to what blocks store; none becomes zero, so that every code has a meaning, and none infinite."""
    least, most = block_format.limits
    values = values / block_format.unit
    within = values.clamp(least, most) if block_format.positive else values.abs().clamp(least, most).copysign(values)
    return within.to(HALVES[block_format.halves])


def from_half(
    halves: Float[Tensor, "*shape"], block_format: BlockFormat, dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """Return the scales that blocks store, which float32 holds exactly."""
    return halves.to(dtype) * block_format.unit


HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
_TENSORS = ("block_scales", "group_scales", "block_minima", "group_minima")


def _products(
    halves: Float[Tensor, "blocks d_out"], integers: Int8[Tensor, "groups d_out"], block_format: BlockFormat
) -> Float[Tensor, "groups d_out"]:
    scales = from_half(halves, block_format, torch.float32)
    return scales.repeat_interleave(block_format.groups_per_block, dim=0) * integers
