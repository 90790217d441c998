"""Block types: how llama.cpp and MLX store a weight in a few bits. Loads no torch.

A row of a weight is cut into blocks, a block into groups of inputs. With the block's float16 numbers d and e and the
group's integers s and m, an entry with code q is w = d·s·level(q) - e·m. Types without integers have s = 1, types
without minima m = 0. A block of MLX is a group, whose d and e are in bfloat16.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

LlamaCppType = Literal[
    "Q8_0", "Q6_K", "Q5_1", "Q5_K", "Q5_0", "Q4_1", "Q4_K", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K"
]
"""Block types of llama.cpp that weights are rounded to, by falling bits."""
# fmt: off
MlxType = Literal[
    "affine8_32", "affine8_64", "affine8_128", "affine6_32", "affine6_64", "affine6_128",
    "affine5_32", "affine5_64", "affine5_128", "affine4_32", "affine4_64", "affine4_128",
    "affine3_32", "affine3_64", "affine3_128", "affine2_32", "affine2_64", "affine2_128",
]
# fmt: on
"""Bits and size of groups of MLX's affine quantization, by falling bits."""
BlockType = Literal[LlamaCppType, MlxType]

BLOCK_TYPES: tuple[BlockType, ...] = get_args(LlamaCppType)
MLX_TYPES: tuple[BlockType, ...] = get_args(MlxType)

# Levels of IQ4_NL and IQ4_XS, which are denser around zero, as weights are.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """How a block type stores a row.

    Attributes:
        name: its name in llama.cpp, or mode, bits and size of groups in MLX.
        block_size: inputs of a block; rows are whole blocks.
        block_bytes: bytes of a block.
        group_size: inputs that share the integers s and m.
        levels: the numbers that codes represent, ascending: consecutive integers, or those of a table.
        scales: least and largest s; (1, 1) if groups are blocks and d is their scale.
        largest_minimum: largest m; 1 if groups are blocks and e is their minimum, 0 if the type has no minima.
        shift: what is added to a level before it is multiplied: levels of 8 bits without a sign do not fit in int8.
        halves: dtype of d and e.
    """

    name: BlockType
    block_size: int
    block_bytes: int
    group_size: int
    levels: tuple[int, ...]
    scales: tuple[int, int] = (1, 1)
    largest_minimum: int = 0
    shift: int = 0
    halves: Literal["float16", "bfloat16"] = "float16"

    @property
    def multiples(self) -> tuple[int, ...]:
        """What the scale is multiplied by: the levels, shifted."""
        return tuple(level + self.shift for level in self.levels)

    @property
    def has_minima(self) -> bool:
        """Whether groups have a minimum."""
        return self.largest_minimum > 0

    @property
    def groups_per_block(self) -> int:
        """Groups of a block."""
        return self.block_size // self.group_size

    @property
    def bits_per_weight(self) -> float:
        """Bits of an entry, with its part of the scales."""
        return 8 * self.block_bytes / self.block_size

    def fits(self, d_in: int) -> bool:
        """Return whether rows of this length are whole blocks."""
        return d_in > 0 and d_in % self.block_size == 0

    def row_bytes(self, d_in: int) -> int:
        """Return the bytes of a row.

        Args:
            d_in: input features, a multiple of the block size.
        """
        assert self.fits(d_in), (self.name, d_in)
        return d_in // self.block_size * self.block_bytes

    def stored_bytes(self, d_in: int, d_out: int) -> int:
        """Return the bytes of a weight.

        Args:
            d_in: input features, a multiple of the block size.
            d_out: output features.
        """
        return d_out * self.row_bytes(d_in)


_small = partial(BlockFormat, block_size=32, group_size=32)
_large = partial(BlockFormat, block_size=256)


def _affine(name: MlxType) -> BlockFormat:
    bits, size = map(int, name.removeprefix("affine").split("_"))
    shift = 128 if bits == 8 else 0
    return BlockFormat(
        name=name,
        block_size=size,
        block_bytes=size * bits // 8 + 4,
        group_size=size,
        levels=tuple(range(-shift, 2**bits - shift)),
        largest_minimum=1,
        shift=shift,
        halves="bfloat16",
    )


_FORMATS = (
    # -128 could be stored, but no file of llama.cpp has it, and engines multiply these codes in 8 bits.
    _small(name="Q8_0", block_bytes=34, levels=tuple(range(-127, 128))),
    _large(name="Q6_K", block_bytes=210, group_size=16, levels=tuple(range(-32, 32)), scales=(-128, 127)),
    _small(name="Q5_1", block_bytes=24, levels=tuple(range(32)), largest_minimum=1),
    _large(name="Q5_K", block_bytes=176, group_size=32, levels=tuple(range(32)), scales=(1, 63), largest_minimum=63),
    _small(name="Q5_0", block_bytes=22, levels=tuple(range(-16, 16))),
    _small(name="Q4_1", block_bytes=20, levels=tuple(range(16)), largest_minimum=1),
    _large(name="Q4_K", block_bytes=144, group_size=32, levels=tuple(range(16)), scales=(1, 63), largest_minimum=63),
    _small(name="Q4_0", block_bytes=18, levels=tuple(range(-8, 8))),
    _small(name="IQ4_NL", block_bytes=18, levels=_NONLINEAR),
    _large(name="IQ4_XS", block_bytes=136, group_size=32, levels=_NONLINEAR, scales=(-32, 31)),
    _large(name="Q3_K", block_bytes=110, group_size=16, levels=tuple(range(-4, 4)), scales=(-32, 31)),
    _large(name="Q2_K", block_bytes=84, group_size=16, levels=tuple(range(4)), scales=(1, 15), largest_minimum=15),
    *map(_affine, get_args(MlxType)),
)
BLOCK_FORMATS: dict[BlockType, BlockFormat] = {each.name: each for each in _FORMATS}


@cache
def block_types_for(d_in: int, types: tuple[BlockType, ...] = BLOCK_TYPES) -> tuple[BlockType, ...]:
    """Return the block types that rows of this length can have, by falling bits.

    Args:
        d_in: input features.
        types: those of the engine.
    """
    return tuple(name for name in types if BLOCK_FORMATS[name].fits(d_in))
