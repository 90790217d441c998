"""Block types: how llama.cpp, MLX and vLLM store a weight in a few bits. Loads no torch.

A row of a weight is cut into blocks, a block into groups of inputs. With the block's float16 numbers d and e and the
group's integers s and m, an entry with code q is w = d·s·level(q) - e·m. Types without integers have s = 1, types
without minima m = 0. A block of MLX is a group, whose d and e are in bfloat16.

FP8 and NVFP4 have floating-point numbers as codes, whose levels are counted in the smallest of them.
"""

from dataclasses import dataclass, replace
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
VllmType = Literal["INT8", "FP8", "NVFP4"]
"""Codes that processors multiply: integers and E4M3 with a scale for each output, and E2M1 with one for 16 inputs."""
BlockType = Literal[LlamaCppType, MlxType, VllmType]

BLOCK_TYPES: tuple[BlockType, ...] = get_args(LlamaCppType)
MLX_TYPES: tuple[BlockType, ...] = get_args(MlxType)
VLLM_TYPES: tuple[BlockType, ...] = get_args(VllmType)

NVFP4_SCALE = 2.0**-9
"""What all scales of NVFP4 are multiplied by, the same in every layer.

vLLM needs one for layers that it fuses. With this one, scales are from 2^-18 to 0.87, for weights up to 5.2.
"""
# Kernels for whole rows take multiples of so many inputs.
_WIDTH = 16

# The magnitudes of E4M3 in units of 2^-9, and of E2M1 in units of a half.
_E4M3 = (*range(8), *((8 + mantissa) << exponent for exponent in range(15) for mantissa in range(8)))[:-1]
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
# Levels of IQ4_NL and IQ4_XS, which are denser around zero, as weights are.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """How a block type stores a row.

    Attributes:
        name: its name in llama.cpp, or mode, bits and size of groups in MLX.
        block_size: inputs of a block; rows are whole blocks. 0 if each row is a block, see `of_row`.
        block_bytes: bytes of a block; without its codes if it is a row.
        group_size: inputs that share the integers s and m.
        levels: the numbers that codes represent, ascending: consecutive integers, or those of a table.
        scales: least and largest s; (1, 1) if groups are blocks and d is their scale.
        largest_minimum: largest m; 1 if groups are blocks and e is their minimum, 0 if the type has no minima.
        shift: what is added to a level before it is multiplied: levels of 8 bits without a sign do not fit in int8.
        halves: dtype of d and e.
        limits: least and largest magnitude of d and e as they are stored.
        unit: what is meant by a stored d of 1.
        positive: whether d is positive, because levels are the same below and above zero.
    """

    name: BlockType
    block_size: int
    block_bytes: int
    group_size: int
    levels: tuple[int, ...]
    scales: tuple[int, int] = (1, 1)
    largest_minimum: int = 0
    shift: int = 0
    halves: Literal["float16", "bfloat16", "float8_e4m3fn"] = "float16"
    # What float16 represents.
    limits: tuple[float, float] = (2.0**-24, 65504.0)
    unit: float = 1.0
    positive: bool = False

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
        """Return whether rows of this length are whole blocks, or of a width that kernels take."""
        return d_in > 0 and d_in % (self.block_size or _WIDTH) == 0

    def of_row(self, d_in: int) -> "BlockFormat":
        """Return the format with the size of its blocks, for rows of a length."""
        if self.block_size:
            return self
        return replace(self, block_size=d_in, group_size=d_in, block_bytes=self.block_bytes + d_in)

    def row_bytes(self, d_in: int) -> int:
        """Return the bytes of a row.

        Args:
            d_in: input features, a multiple of the block size.
        """
        assert self.fits(d_in), (self.name, d_in)
        row = self.of_row(d_in)
        return d_in // row.block_size * row.block_bytes

    def stored_bytes(self, d_in: int, d_out: int) -> int:
        """Return the bytes of a weight.

        Args:
            d_in: input features, a multiple of the block size.
            d_out: output features.
        """
        return d_out * self.row_bytes(d_in)


def _signed(magnitudes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(-level for level in reversed(magnitudes[1:])), *magnitudes)


_small = partial(BlockFormat, block_size=32, group_size=32)
_large = partial(BlockFormat, block_size=256)
# Scales that float16 represents as bfloat16 does.
_row = partial(
    BlockFormat,
    block_size=0,
    block_bytes=2,
    group_size=0,
    halves="bfloat16",
    limits=(2.0**-17, 2.0**15),
    positive=True,
)


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
    _row(name="INT8", levels=tuple(range(-127, 128))),
    _row(name="FP8", levels=_signed(_E4M3), unit=2.0**-9),
    BlockFormat(
        name="NVFP4",
        block_size=16,
        block_bytes=9,
        group_size=16,
        levels=_signed(_E2M1),
        halves="float8_e4m3fn",
        limits=(2.0**-9, 448.0),
        unit=NVFP4_SCALE / 2,
        positive=True,
    ),
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
