"""Storage of rounded weights: bits of codes and scales, and the size of groups. Loads no torch."""

import bisect
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockFormat, BlockType, block_types_for
from rocket_core.sizes.budget import bits_budget, quantized_bytes, scale_bytes

CodeBits = Literal[2, 3, 4, 5, 6, 7, 8]
ScaleBits = Literal[6, 8, 16]
GroupSize = Literal[0, 8, 16, 32, 64, 128]
"""Inputs that share a scale; 0 for all inputs of an output."""

MEMORY_GROUPS: tuple[GroupSize, ...] = (32, 64, 0)
"""Sizes of groups of layers that are to be small in memory as well.

Scales have 32 bits there, or 16, so that codes of 4 bits in groups of 16 take 6 bits per weight and more; and the
fastest kernel on a CPU needs groups of 32. At 0.281, 0.2 and 0.15 of the bytes on disk, `best` has 1.03, 1.01 and 1.08
of the KL divergence that it has on stories260K with groups of 8 and 16 as well (measured before scales of whole outputs
had 8 bits).
"""
CODE_BITS: tuple[CodeBits, ...] = (2, 3, 4, 5, 6, 7, 8)

# Bits of the scales of groups of a size. Small groups with scales of few bits have less error for their bytes than
# large ones with float16 scales. With 8 bits instead of 16 for groups of 64 and whole outputs, the loss that the
# profile of stories260K predicts at 0.15, 0.2 and 0.3 of the bytes and fixed length is 5, 2 and 1 % smaller.
_SCALE_BITS: dict[GroupSize, ScaleBits] = {8: 6, 16: 6, 32: 8, 64: 8, 128: 8, 0: 8}
_USUAL_GROUPS: tuple[GroupSize, ...] = (8, 16, 32, 64, 0)
# Groups that codes of 8 bits may have with scales of 16 bits, by whether groups of less than 32 inputs are usual. They
# fill the gap between 8.5 bits per weight and dense weights.
_FINEST_GROUPS: dict[bool, tuple[GroupSize, ...]] = {False: (32,), True: (16, 8)}
# Other candidates take at least this part of the bytes of the smallest format. Fewer leave little of a model.
_LEAST_CODED_PART = 0.5
# Aligned codes fill words of so many bits.
_WORD_BITS = 32
# Bits per weight of low-rank candidates whose factors are codes. With more, codes of the weight itself have less error:
# on stories260K and MiniLM the knapsack takes none with 2.6 or 3 bits at 0.13 to 0.3 of the bytes, and those are the
# slowest to profile.
_FACTOR_BITS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.3)
# A Huffman code takes at least a bit for a byte, of at most three codes, and at most so many bytes for its table.
_CODES_PER_BIT, _STREAM_BYTES = 3, 64
# Logarithmic steps per octave, by the bits of a scale; for scales in float16 those of their unit.
_STEPS_PER_OCTAVE: dict[ScaleBits, int] = {6: 6, 8: 12, 16: 1}
# Units of scales are within this many octaves of 1, so that no weight overflows in float32 and no scale becomes zero.
_MOST_OCTAVES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeChoices:
    """The formats that quantized candidates may have.

    Attributes:
        bits: bits of a code.
        group_sizes: inputs that share a scale; None for those that are usual.
        alone: whether layers may be stored in no other way than as codes or dense.
        aligned: whether groups fill an output evenly and its codes whole words of 32 bits, and scales are as
            `CodeFormat.bfloat16_scales` says: what compressed-tensors stores.
        blocks: the block types that layers have instead; bits and group sizes do not matter then.
        finest: whether codes of 8 bits may also have float16 scales for small groups.
        fixed: whether layers may have codes of a fixed number of bits.
        entropy_coded: whether layers may be entropy coded, down to `fewest_coded_bytes`.
        factors: whether layers may also be low-rank factors of codes.
    """

    bits: tuple[CodeBits, ...] = CODE_BITS
    group_sizes: tuple[GroupSize, ...] | None = None
    alone: bool = False
    aligned: bool = False
    blocks: tuple[BlockType, ...] = ()
    finest: bool = False
    fixed: bool = True
    entropy_coded: bool = False
    factors: bool = False

    @property
    def of_tables(self) -> "CodeChoices":
        """The formats that token embedding and head may have."""
        return replace(self, alone=True, entropy_coded=False, factors=False)

    def groups(self, d_in: int) -> list[tuple[int, ScaleBits]]:
        """Return the sizes of groups in a layer, and the bits of their scales.

        A usual size is left out if a layer has less than two groups of it; one that was asked for is the whole output
        then.
        """
        if self.group_sizes is None:
            return [(size or d_in, _SCALE_BITS[size]) for size in _USUAL_GROUPS if 2 * size <= d_in]
        whole = (d_in, _SCALE_BITS[0])
        sizes = [(size, _SCALE_BITS[size]) if 0 < size < d_in else whole for size in self.group_sizes]
        return [*dict.fromkeys(sizes)]

    def finest_groups(self, d_in: int, bits: CodeBits) -> list[tuple[int, ScaleBits]]:
        """Return the additional sizes of groups of codes of so many bits, and the bits of their scales."""
        if not self.finest or bits < CODE_BITS[-1]:
            return []
        return [(size, 16) for size in _FINEST_GROUPS[self.group_sizes is None] if 2 * size <= d_in]


ANY_CODES = CodeChoices(finest=True)
"""All formats."""


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

    def low_rank_bytes(self, d_in: int, d_out: int, rank: int) -> int:
        """Return the bytes on disk of a low-rank layer whose two factors are codes, without its bias.

        Atoms are stored by input, and coefficients as one sequence.
        """
        return self.stored_bytes(rank, d_in) + self.stored_bytes(rank * d_out, 1)

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


FACTOR_CODES = CodeFormat(bits=3, group_size=16, scale_bits=6)
"""Format of the factors of low-rank candidates that are codes.

On layers of stories260K, at equal bytes of 1.6 to 3 bits per weight, squared errors are 6 to 9 % larger with groups of
8, 9 to 11 % with groups of 32 and scales of 8 bits, up to 37 % with 2 bits, and 20 to 34 % with 4 bits.
"""


def value_format(bits: int) -> CodeFormat:
    """Return the format of the kept numbers of a layer that are stored in fewer bits afterwards."""
    width = next(width for width in CODE_BITS if width == bits)
    return CodeFormat(bits=width, group_size=32, scale_bits=8)


def coded_format(d_in: int) -> CodeFormat:
    """Return the format of entropy-coded codes once they are decoded: 8 bits, with one scale for every output."""
    return CodeFormat(bits=8, group_size=d_in, scale_bits=8)


@cache
def formats_for(d_in: int, choices: CodeChoices = ANY_CODES) -> tuple[CodeFormat, ...]:
    """Return the formats that a layer is profiled with; none if they must be aligned and it is too odd.

    Args:
        d_in: input features.
        choices: the formats that it may have.
    """
    if choices.aligned:
        return tuple(
            CodeFormat(bits=bits, group_size=size, scale_bits=16, bfloat16_scales=True)
            for bits in choices.bits
            for size, _ in choices.groups(d_in)
            if d_in % size == 0 and d_in * bits % _WORD_BITS == 0
        )
    return tuple(
        CodeFormat(bits=bits, group_size=size, scale_bits=scale_bits)
        for bits in choices.bits
        for size, scale_bits in [*choices.groups(d_in), *choices.finest_groups(d_in, bits)]
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


def fewest_bytes(d_in: int, d_out: int, choices: CodeChoices = ANY_CODES) -> int | None:
    """Return the bytes of a layer in the smallest of these formats; None if it has none."""
    formats: tuple[CodeFormat | BlockFormat, ...] = formats_for(d_in, choices)
    if choices.blocks:
        formats = tuple(BLOCK_FORMATS[block_type] for block_type in block_types_for(d_in, choices.blocks))
    return min((each.stored_bytes(d_in, d_out) for each in formats), default=None)


def fewest_coded_bytes(d_in: int, d_out: int) -> int:
    """Return a lower bound on the bytes of a layer that is entropy coded, or whose factors are codes."""
    fewest = fewest_bytes(d_in, d_out)
    assert fewest is not None, "formats that need not be aligned suit every layer"
    return math.ceil(_LEAST_CODED_PART * fewest)


def most_coded_bytes(d_in: int, d_out: int) -> int:
    """Return an upper bound on the bytes of a layer's smallest entropy-coded candidate.

    Codes become fewer until the candidate has `fewest_coded_bytes`, or all are zero, as in layers so small that the
    code's table takes more.
    """
    zeros = _STREAM_BYTES + d_in * d_out // (8 * _CODES_PER_BIT) + coded_format(d_in).scale_bytes(d_in, d_out)
    return max(fewest_coded_bytes(d_in, d_out), zeros)


@lru_cache(maxsize=2**14)
def factor_ranks(d_in: int, d_out: int) -> tuple[int, ...]:
    """Return the ranks of a layer's low-rank candidates whose factors are codes, falling; none if it is too small.

    Each is the largest within one of some numbers of bits per weight.
    """
    ranks = range(1, min(d_in, d_out) + 1)
    within = {
        bisect.bisect_right(ranks, bits_budget(d_in * d_out, bits), key=lambda rank: _factor_bytes(d_in, d_out, rank))
        for bits in _FACTOR_BITS
    }
    least = fewest_coded_bytes(d_in, d_out)
    return tuple(
        rank for rank in sorted(within, reverse=True) if rank >= 1 and _factor_bytes(d_in, d_out, rank) >= least
    )


def fewest_factor_bytes(d_in: int, d_out: int) -> int | None:
    """Return the bytes of a layer's smallest low-rank candidate whose factors are codes; None if it has none."""
    return min((_factor_bytes(d_in, d_out, rank) for rank in factor_ranks(d_in, d_out)), default=None)


def _factor_bytes(d_in: int, d_out: int, rank: int) -> int:
    return FACTOR_CODES.low_rank_bytes(d_in, d_out, rank)
