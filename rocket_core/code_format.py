"""Storage of rounded weights: bits of codes and scales, and the size of groups. Loads no torch."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rocket_core.budget import quantized_bytes, scale_bytes

CodeBits = Literal[2, 3, 4, 5, 6, 8]
ScaleBits = Literal[6, 8, 16]

CODE_BITS: tuple[CodeBits, ...] = (2, 3, 4, 5, 6, 8)

# Size of groups and bits of their scales; 0 is a whole output. Small groups with scales of few bits have less error for
# their bytes than large ones with float16 scales.
_GROUPS: tuple[tuple[int, ScaleBits], ...] = ((8, 6), (16, 6), (32, 8), (64, 16), (0, 16))
# Logarithmic steps per octave, by the bits of a scale; for scales in float16 those of their unit.
_STEPS_PER_OCTAVE: dict[ScaleBits, int] = {6: 6, 8: 12, 16: 1}
# Units of scales are within this many octaves of 1, so that no weight overflows in float32 and no scale becomes zero.
_MOST_OCTAVES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFormat:
    """How a rounded weight is stored.

    Attributes:
        bits: bits of a code: integers from -2^(bits - 1) to 2^(bits - 1) - 1. The sign of the scale decides on which
            side of zero the additional integer is.
        group_size: inputs that share a scale, >= 1; the last group of an output may have fewer.
        scale_bits: bits of a scale: 16 for float16, 6 or 8 for a logarithmic scale.
        bfloat16_scales: whether scales have a unit of 1 and 8 significant bits, so that bfloat16 represents them as
            well as float16; only for scales of 16 bits.
    """

    bits: CodeBits
    group_size: int
    scale_bits: ScaleBits
    bfloat16_scales: bool = False

    def stored_bytes(self, d_in: int, d_out: int) -> int:
        """Return the bytes on disk of a layer, without its bias."""
        return quantized_bytes(d_in, d_out, self.bits, self.group_size, self.scale_bits)

    def scale_bytes(self, d_in: int, d_out: int) -> int:
        """Return the bytes on disk of a layer's scales."""
        return scale_bytes(d_in, d_out, self.group_size, self.scale_bits)

    def groups(self, d_in: int) -> int:
        """Return the number of groups of an output."""
        return math.ceil(d_in / self.group_size)

    @property
    def steps_per_octave(self) -> int:
        """Logarithmic steps per octave: of scales, or of their unit if they are float16."""
        return _STEPS_PER_OCTAVE[self.scale_bits]

    @property
    def largest_exponent(self) -> int:
        """The largest `Scales.exponent`; the smallest is its negative."""
        return _MOST_OCTAVES * self.steps_per_octave


def coded_format(d_in: int) -> CodeFormat:
    """Return the format of entropy-coded codes once they are decoded: 8 bits, with one scale for every output."""
    return CodeFormat(bits=8, group_size=d_in, scale_bits=8)


@cache
def formats_for(d_in: int) -> tuple[CodeFormat, ...]:
    """Return the formats that a layer is profiled with.

    Args:
        d_in: input features.
    """
    groups = [(size or d_in, scale_bits) for size, scale_bits in _GROUPS if 2 * size <= d_in]
    return tuple(
        CodeFormat(bits=bits, group_size=size, scale_bits=scale_bits)
        for bits in CODE_BITS
        for size, scale_bits in groups
    )


@cache
def formats_beside_coded(d_in: int, d_out: int) -> tuple[CodeFormat, ...]:
    """Return the formats that a layer is profiled with if it may also be entropy coded.

    These are the formats of 8 bits, and the smallest. From 2.5 to 15 bits per weight of stories260K and tiny-llama, the
    knapsack took one of the others for 2 of 1,078 layers.

    Args:
        d_in: input features.
        d_out: output features.
    """
    fewest = fewest_bytes(d_in, d_out)
    return tuple(
        code_format
        for code_format in formats_for(d_in)
        if code_format.bits == CODE_BITS[-1] or code_format.stored_bytes(d_in, d_out) == fewest
    )


def fewest_bytes(d_in: int, d_out: int) -> int:
    """Return the bytes of a layer in the smallest of these formats."""
    return min(code_format.stored_bytes(d_in, d_out) for code_format in formats_for(d_in))
