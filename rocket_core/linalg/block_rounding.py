"""Rounding of a weight to a block type, with the least error of the layer's output.

The scales are found first, as the type stores them. Codes are then rounded under them by the algorithms of
`rocket_core.linalg.rounding`, and codes and scales are improved by turns.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.block_codes import BlockScales, BlockWeight, from_half, in_half
from rocket_core.linalg.block_scales import search_block_scales, whole_minima, whole_scales
from rocket_core.linalg.rounding import RoundingGram, descend, errors_from, start
from rocket_core.sizes.block_types import BlockFormat

# Turns of refitting the scales and improving the codes.
_TURNS = 2
# Visits to the scales of a block before the next block.
_VISITS = 3


def round_to_blocks(
    weight: Float[Tensor, "d_in d_out"], gram: RoundingGram, block_format: BlockFormat, *, splitting: bool = True
) -> tuple[BlockWeight, Float[Tensor, " d_out"]]:
    """Round a weight: the better of GPTQ and splitting for each output, then descent over codes and scales by turns.

    Args:
        weight: W.
        gram: prepared Gram matrix, in the weight's dtype.
        block_format: the block type; rows are whole blocks.
        splitting: also try splitting, which doubles the time. It matters below 4 bits.

    Returns:
        The rounding, and the error of each output under the damped matrix, in float64.
    """
    scales = search_block_scales(weight, gram.matrix.diagonal(), block_format)
    rounded = start(weight, gram, scales, splitting=splitting)
    slope = gram.slope(weight, rounded)
    rounded = descend(weight, gram, rounded, slope)
    for _ in range(_TURNS):
        rounded = descend(weight, gram, refit_block_scales(gram, rounded, slope), slope)
    return rounded, errors_from(slope, weight, rounded)


def refit_block_scales(
    gram: RoundingGram, rounded: BlockWeight, slope: Float[Tensor, "d_in d_out"], *, sweeps: int = 1
) -> BlockWeight:
    """Return the same codes with better scales: each in turn takes the best value that can be stored, given all others.

    The error is quadratic in d, e, and every s and m, so that it never increases. A sweep costs n²m.

    Args:
        gram: prepared Gram matrix, in the dtype of the slope.
        rounded: codes, and the scales to start from.
        slope: its `RoundingGram.slope`, which becomes that of the result.
        sweeps: number of visits to every block.
    """
    matrix, block_format = gram.matrix, rounded.scales.format
    blocks = _Block.all_of(rounded, slope.dtype)
    for _ in range(sweeps):
        for number, block in enumerate(blocks):
            inputs = slice(number * block_format.block_size, (number + 1) * block_format.block_size)
            before = block.weight()
            block.refit(matrix[inputs, inputs], slope[inputs])
            slope.addmm_(matrix[:, inputs], block.weight().sub_(before), alpha=-1)
    scales, minima = rounded.scales, [block.minimum for block in blocks]
    return BlockWeight(
        codes=rounded.codes,
        scales=BlockScales(
            block_scales=in_half(torch.stack([block.scale for block in blocks]), block_format),
            group_scales=torch.cat([block.scales for block in blocks]).to(torch.int8),
            block_minima=None if scales.block_minima is None else in_half(torch.stack(minima), block_format),
            group_minima=None
            if scales.group_minima is None
            else torch.cat([block.minima for block in blocks]).to(torch.int8),
            format=block_format,
        ),
    )


@dataclass(kw_only=True, slots=True)
class _Block:
    """A block of every output, with numbers in the computing precision.

    Attributes:
        codes: the codes, shifted.
        scale, minimum: what d and e mean; e is zero if the type has no minima.
        scales, minima: s and m of each group.
        format: the block type.
    """

    codes: Float[Tensor, "groups size d_out"]
    scale: Float[Tensor, " d_out"]
    scales: Float[Tensor, "groups d_out"]
    minimum: Float[Tensor, " d_out"]
    minima: Float[Tensor, "groups d_out"]
    format: BlockFormat

    @classmethod
    def all_of(cls, rounded: BlockWeight, dtype: torch.dtype) -> list["_Block"]:
        """Return the blocks of a weight."""
        scales, block_format = rounded.scales, rounded.scales.format
        groups, d_out = block_format.groups_per_block, rounded.codes.shape[1]
        codes = rounded.codes.view(-1, groups, block_format.group_size, d_out)
        group_scales = scales.group_scales.view(-1, groups, d_out).to(dtype)
        nothing = torch.zeros_like(scales.block_scales)
        minimum = nothing if scales.block_minima is None else scales.block_minima
        minima = torch.zeros_like(scales.group_scales) if scales.group_minima is None else scales.group_minima
        return [
            cls(
                codes=codes[number].to(dtype) + block_format.shift,
                scale=from_half(scales.block_scales[number], block_format, dtype),
                scales=group_scales[number],
                minimum=minimum[number].to(dtype),
                minima=minima.view(-1, groups, d_out)[number].to(dtype),
                format=block_format,
            )
            for number in range(len(codes))
        ]

    def weight(self) -> Float[Tensor, "inputs d_out"]:
        """Return the rounded weight of the block."""
        values = self.codes * (self.scale * self.scales)[:, None] - (self.minimum * self.minima)[:, None]
        return values.flatten(0, 1)

    def refit(self, matrix: Float[Tensor, "inputs inputs"], slope: Float[Tensor, "inputs d_out"]) -> None:
        """Improve the scales.

        Args:
            matrix: the block's part of G.
            slope: the block's part of G(W - W̃).
        """
        slope = slope.clone()
        shared = self.format.groups_per_block > 1
        for _ in range(_VISITS if shared or self.format.has_minima else 1):
            if shared:
                for group in range(self.format.groups_per_block):
                    self._refit_group(group, matrix, slope)
            direction = (self.codes * self.scales[:, None]).flatten(0, 1)
            found = self._storable(self.scale + _best_change(direction, matrix, slope))
            slope.addmm_(matrix, direction.mul_(found - self.scale), alpha=-1)
            self.scale = found
            if self.format.has_minima:
                direction = -self.minima.repeat_interleave(self.format.group_size, dim=0)
                found = self._storable(self.minimum + _best_change(direction, matrix, slope))
                slope.addmm_(matrix, direction.mul_(found - self.minimum), alpha=-1)
                self.minimum = found

    def _storable(self, scales: Float[Tensor, " d_out"]) -> Float[Tensor, " d_out"]:
        return from_half(in_half(scales, self.format), self.format, scales.dtype)

    def _refit_group(
        self, group: int, matrix: Float[Tensor, "inputs inputs"], slope: Float[Tensor, "inputs d_out"]
    ) -> None:
        """Improve s and m of a group, and update the slope."""
        size = self.format.group_size
        inputs = slice(group * size, (group + 1) * size)
        own = matrix[inputs, inputs]
        direction = self.codes[group] * self.scale
        found = whole_scales(self.scales[group] + _best_change(direction, own, slope[inputs]), self.format)
        slope.addmm_(matrix[:, inputs], direction.mul_(found - self.scales[group]), alpha=-1)
        self.scales[group] = found
        if self.format.has_minima:
            direction = (-self.minimum).expand(size, -1).clone()
            found = whole_minima(self.minima[group] + _best_change(direction, own, slope[inputs]), self.format)
            slope.addmm_(matrix[:, inputs], direction.mul_(found - self.minima[group]), alpha=-1)
            self.minima[group] = found


def _best_change(
    direction: Float[Tensor, "n d_out"], matrix: Float[Tensor, "n n"], slope: Float[Tensor, "n d_out"]
) -> Float[Tensor, " d_out"]:
    """Return the multiple of each output's direction that reduces the error most; 0 for directions without effect."""
    curvature = (direction * (matrix @ direction)).sum(dim=0)
    return torch.where(curvature > 0, (direction * slope).sum(dim=0) / curvature, 0)
