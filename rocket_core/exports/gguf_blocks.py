"""Bytes of weights under block types: those of llama.cpp's files, and in a work folder those of MLX and vLLM."""

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int, Int16, UInt8
from torch import Tensor

from rocket_core.linalg.block_codes import HALVES, BlockScales, BlockWeight
from rocket_core.linalg.code_grids import Levels
from rocket_core.sizes.block_types import BLOCK_FORMATS, MLX_TYPES, BlockFormat, BlockType

_Source = Literal["codes", "scales", "minima"]

# Types whose codes are stored in two's complement.
_SIGNED_BYTES = ("Q8_0", "INT8")
# Entries that are packed at once.
_TOGETHER = 2**22


@dataclass(frozen=True, slots=True)
class _Bits:
    """Some bits of some integers of a block, and their places in a run of bytes.

    The integers are cut into rows of `parts · width`. Byte i of a row has the integers i, i + width, i + 2·width and so
    on, from its bit `at` upwards; or, if they are interleaved, the integers i·parts, i·parts + 1 and so on.

    Attributes:
        source: which integers.
        bits: number of bits of each.
        parts: integers of a byte.
        width: bytes of a row.
        first: lowest bit that is taken.
        at: place of the first integer in a byte.
        begin: the first integer.
        end: after the last integer; None for all.
        interleaved: see above.
    """

    source: _Source
    bits: int
    parts: int
    width: int
    first: int = 0
    at: int = 0
    begin: int = 0
    end: int | None = None
    interleaved: bool = False

    def pack(self, integers: Int16[Tensor, "blocks count"]) -> Int16[Tensor, "blocks size"]:
        """Return the bits of the integers in their places, in a number for each byte."""
        taken = (integers[:, self.begin : self.end] >> self.first) & (2**self.bits - 1)
        blocks = len(taken)
        if self.interleaved:
            rows = taken.reshape(blocks, -1, self.width, self.parts).mT
        else:
            rows = taken.reshape(blocks, -1, self.parts, self.width)
        shifted: Tensor = rows << self._shifts(rows)
        return shifted.sum(dim=2, dtype=torch.int16).reshape(blocks, -1)

    def unpack(self, packed: Int16[Tensor, "blocks size"], integers: Int16[Tensor, "blocks count"]) -> None:
        """Add to the integers what a run of bytes says of them."""
        blocks = len(packed)
        rows = packed.view(blocks, -1, 1, self.width)
        rows = (rows >> self._shifts(rows)) & (2**self.bits - 1)
        integers[:, self.begin : self.end] += (rows.mT if self.interleaved else rows).reshape(blocks, -1) << self.first

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.arange(self.parts, dtype=torch.int16, device=like.device)[:, None] * self.bits + self.at


@dataclass(frozen=True, slots=True)
class _Stream:
    """The codes of a block as one run of bits, the lowest of each first: how MLX packs them.

    Attributes:
        bits: number of bits of each.
        source: which integers.
    """

    bits: int
    source: _Source = "codes"

    def pack(self, integers: Int16[Tensor, "blocks count"]) -> Int16[Tensor, "blocks size"]:
        """Return a number for each byte."""
        return _regrouped(integers, self.bits, 8)

    def unpack(self, packed: Int16[Tensor, "blocks size"], integers: Int16[Tensor, "blocks count"]) -> None:
        """Add to the integers what the bytes say of them."""
        integers += _regrouped(packed, 8, self.bits)


def _regrouped(numbers: Int16[Tensor, "blocks count"], bits: int, new: int) -> Int16[Tensor, "blocks other"]:
    """Return the numbers of `new` bits whose bits in a row are those of numbers of `bits` bits."""
    row = (numbers[:, :, None] >> torch.arange(bits, dtype=torch.int16)) & 1
    shifted: Tensor = row.view(len(numbers), -1, new) << torch.arange(new, dtype=torch.int16)
    return shifted.sum(dim=2, dtype=torch.int16)


_Run = tuple[_Bits | _Stream, ...]

# Halves of a block's numbers, and runs of bytes, in the order in which llama.cpp's structures have them.
_D, _E = "d", "e"
_LOW_NIBBLES: _Run = (_Bits("codes", 4, 2, 16),)
_FIFTH_BITS: _Run = (_Bits("codes", 1, 8, 4, first=4, interleaved=True),)
_NIBBLES_OF_PAIRS: _Run = (_Bits("codes", 4, 2, 32),)
_CRUMBS: _Run = (_Bits("codes", 2, 4, 32),)
_SIX_BIT_SCALES: tuple[_Run, ...] = (
    (_Bits("scales", 6, 1, 4, end=4), _Bits("scales", 2, 1, 4, first=4, at=6, begin=4)),
    (_Bits("minima", 6, 1, 4, end=4), _Bits("minima", 2, 1, 4, first=4, at=6, begin=4)),
    (_Bits("scales", 4, 1, 4, begin=4), _Bits("minima", 4, 1, 4, at=4, begin=4)),
)
_LAYOUTS: dict[BlockType, tuple[str | _Run, ...]] = {
    "Q8_0": (_D, (_Bits("codes", 8, 1, 32),)),
    "Q6_K": ((_Bits("codes", 4, 2, 64),), (_Bits("codes", 2, 4, 32, first=4),), (_Bits("scales", 8, 1, 16),), _D),
    "Q5_1": (_D, _E, _FIFTH_BITS, _LOW_NIBBLES),
    "Q5_K": (_D, _E, *_SIX_BIT_SCALES, (_Bits("codes", 1, 8, 32, first=4),), _NIBBLES_OF_PAIRS),
    "Q5_0": (_D, _FIFTH_BITS, _LOW_NIBBLES),
    "Q4_1": (_D, _E, _LOW_NIBBLES),
    "Q4_K": (_D, _E, *_SIX_BIT_SCALES, _NIBBLES_OF_PAIRS),
    "Q4_0": (_D, _LOW_NIBBLES),
    "IQ4_NL": (_D, _LOW_NIBBLES),
    "IQ4_XS": (
        _D,
        (_Bits("scales", 2, 4, 2, first=4, interleaved=True),),
        (_Bits("scales", 4, 2, 4, interleaved=True),),
        _LOW_NIBBLES,
    ),
    "Q3_K": (
        (_Bits("codes", 1, 8, 32, first=2),),
        _CRUMBS,
        (_Bits("scales", 4, 2, 8),),
        (_Bits("scales", 2, 4, 4, first=4),),
        _D,
    ),
    "Q2_K": ((_Bits("scales", 4, 1, 16), _Bits("minima", 4, 1, 16, at=4)), _CRUMBS, _D, _E),
    "INT8": (_D, (_Bits("codes", 8, 1, 16),)),
    "FP8": (_D, (_Bits("codes", 8, 1, 16),)),
    "NVFP4": (_D, (_Bits("codes", 4, 2, 8, interleaved=True),)),
    **{name: (_D, _E, (_Stream((len(BLOCK_FORMATS[name].levels) - 1).bit_length()),)) for name in MLX_TYPES},
}


def pack_blocks(rounded: BlockWeight) -> UInt8[Tensor, "d_out row_bytes"]:
    """Return the bytes of a weight's rows, block by block, on the CPU."""
    parts = [_pack(rounded, columns) for columns in _parts(*rounded.shape)]
    return torch.cat(parts) if parts else torch.empty(0, 0, dtype=torch.uint8)


def unpack_blocks(packed: UInt8[Tensor, "d_out row_bytes"], block_type: BlockType) -> BlockWeight:
    """Return the weight whose rows have these bytes.

    Args:
        packed: whole blocks for each row.
        block_type: the block type.
    """
    block_format = BLOCK_FORMATS[block_type]
    d_out, row_bytes = packed.shape
    block_format = block_format.of_row(row_bytes - block_format.block_bytes)
    d_in = row_bytes // block_format.block_bytes * block_format.block_size
    parts = [_unpack(packed[columns], block_format) for columns in _parts(d_in, d_out)]

    def whole(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.T for tensor in tensors], dim=1)

    scales = BlockScales(
        block_scales=whole([part["d"] for part in parts]),
        group_scales=whole([part["scales"] for part in parts]),
        block_minima=whole([part["e"] for part in parts]) if block_format.has_minima else None,
        group_minima=whole([part["minima"] for part in parts]) if block_format.has_minima else None,
        format=block_format,
    )
    return BlockWeight(codes=whole([part["codes"] for part in parts]), scales=scales)


def _parts(d_in: int, d_out: int) -> Iterator[slice]:
    width = max(1, _TOGETHER // d_in)
    return (slice(begin, begin + width) for begin in range(0, d_out, width))


def _pack(rounded: BlockWeight, columns: slice) -> UInt8[Tensor, "outputs row_bytes"]:
    scales, block_format = rounded.scales, rounded.scales.format

    def by_block(integers: Tensor) -> Tensor:
        per_block = block_format.block_size * len(integers) // len(rounded.codes)
        return integers[:, columns].cpu().T.contiguous().view(-1, per_block)

    integers = {
        "codes": _stored_codes(by_block(rounded.codes), block_format),
        "scales": by_block(scales.group_scales).to(torch.int16) - _stored_zero(block_format),
    }
    halves = {_D: scales.block_scales}
    if scales.group_minima is not None and scales.block_minima is not None:
        integers["minima"] = by_block(scales.group_minima).to(torch.int16)
        # Types without integers store the minimum itself.
        halves[_E] = scales.block_minima if block_format.groups_per_block > 1 else -scales.block_minima
    fields = []
    for field in _LAYOUTS[block_format.name]:
        if isinstance(field, str):
            fields.append(halves[field][:, columns].cpu().T.flatten()[:, None].view(torch.uint8))
        else:
            run = functools.reduce(operator.add, (bits.pack(integers[bits.source]) for bits in field))
            fields.append(run.to(torch.uint8))
    outputs = len(range(rounded.codes.shape[1])[columns])
    return torch.cat(fields, dim=1).view(outputs, -1)


def _unpack(packed: UInt8[Tensor, "outputs row_bytes"], block_format: BlockFormat) -> dict[str, Tensor]:
    """Return d, e, codes, scales and minima, by output."""
    blocks = packed.reshape(-1, block_format.block_bytes)
    groups = block_format.groups_per_block
    sizes = {"codes": block_format.block_size, "scales": groups, "minima": groups}
    found = {name: torch.zeros(len(blocks), size, dtype=torch.int16) for name, size in sizes.items()}
    position = 0
    for field in _LAYOUTS[block_format.name]:
        if isinstance(field, str):
            dtype = HALVES[block_format.halves]
            found[field] = blocks[:, position : position + dtype.itemsize].contiguous().view(dtype)
            position += dtype.itemsize
            continue
        size = field[0].pack(found[field[0].source]).shape[1]
        run = blocks[:, position : position + size].to(torch.int16)
        for bits in field:
            bits.unpack(run, found[bits.source])
        position += size
    found["codes"] = _codes(found["codes"], block_format)
    if groups == 1:
        found["scales"], found["minima"] = torch.ones_like(found["scales"]), torch.ones_like(found["minima"])
        if _E in found:
            found[_E] = -found[_E]
    elif block_format.scales[0] == -128:
        found["scales"] = found["scales"].to(torch.uint8).view(torch.int8)
    found["scales"] = (found["scales"] + _stored_zero(block_format)).to(torch.int8)
    found["minima"] = found["minima"].to(torch.int8)
    return {name: tensor.reshape(len(packed), -1) for name, tensor in found.items()}


def _stored_zero(block_format: BlockFormat) -> int:
    """Return the s that is stored as zero; 0 if s is stored as it is."""
    smallest = block_format.scales[0]
    return smallest if -128 < smallest < 0 else 0


def _stored_codes(codes: Int[Tensor, "blocks size"], block_format: BlockFormat) -> Int16[Tensor, "blocks size"]:
    """Return what is stored for each level."""
    levels = block_format.levels
    if block_format.name in _SIGNED_BYTES:
        return codes.to(torch.int16)
    places = torch.searchsorted(torch.tensor(levels, dtype=codes.dtype), codes).to(torch.int16)
    if not block_format.positive:
        return places
    signed = places - len(levels) // 2
    return torch.where(signed < 0, _sign_bit(block_format) - signed, signed)


def _codes(stored: Int16[Tensor, "blocks size"], block_format: BlockFormat) -> Int[Tensor, "blocks size"]:
    """Return the level of each stored number."""
    if block_format.name in _SIGNED_BYTES:
        return stored.to(torch.uint8).view(torch.int8)
    levels, places = block_format.levels, stored.long()
    if block_format.positive:
        sign = _sign_bit(block_format)
        places = torch.where(places < sign, places, sign - places) + len(levels) // 2
    return torch.tensor(levels, dtype=Levels.of(levels).dtype)[places]


def _sign_bit(block_format: BlockFormat) -> int:
    return 1 << (len(block_format.levels) // 2).bit_length()
