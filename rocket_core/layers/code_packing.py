"""Packing of integers of 2 to 8 bits into bytes."""

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from rocket_core.sizes.budget import packed_bytes

# Integers that fill a whole number of bytes.
_WORD = 8


def pack_integers(values: UInt8[Tensor, " n"], bits: int) -> UInt8[Tensor, " bytes"]:
    """Pack integers into one stream of bits: integer k is the `bits` bits from bit k · bits on, lowest first.

    Bit i of the stream is bit i % 8, counted from the lowest, of byte i // 8. Every 8 integers fill `bits` bytes, a
    little-endian number in which the first integer has the lowest bits; the last are filled up with zeros.

    Args:
        values: integers below 2^bits.
        bits: 2 to 8.

    Returns:
        New memory of `budget.packed_bytes` bytes, on the device of the values.
    """
    integers = values.new_zeros(packed_bytes(len(values), _WORD))
    integers[: len(values)] = values
    if bits == _WORD:
        return integers
    words = integers.view(torch.int64)
    for width in (1, 2, 4):
        low, shift = _low_halves(width, bits), width * (_WORD - bits)
        words = (words & low) | ((words >> shift) & (low << (width * bits)))
    return words.view(torch.uint8).view(-1, _WORD)[:, :bits].flatten()


def unpack_integers(packed: UInt8[Tensor, " bytes"], bits: int, n: int) -> UInt8[Tensor, " n"]:
    """Unpack integers; the inverse of `pack_integers`.

    Costs a few operations on each number of 64 bits, which contains 8 integers.

    Args:
        packed: `budget.packed_bytes` bytes.
        bits: 2 to 8.
        n: number of integers.

    Returns:
        The integers: a view for 8 bits, new memory otherwise.
    """
    if bits == _WORD:
        return packed[:n]
    filled = packed.new_zeros(len(packed) // bits, _WORD)
    filled[:, :bits] = packed.view(-1, bits)
    words = filled.view(torch.int64).flatten()
    for width in (4, 2, 1):
        low, shift = _low_halves(width, bits), width * (_WORD - bits)
        words = (words & low) | ((words & (low << (width * bits))) << shift)
    return words.view(torch.uint8)[:n]


def unpack_rows(
    packed: UInt8[Tensor, " bytes"], bits: int, rows: Int64[Tensor, " n"], width: int
) -> UInt8[Tensor, "n width"]:
    """Unpack some rows of a packed matrix, and nothing else of it.

    Args:
        packed: all integers, row after row.
        bits: 2 to 8.
        rows: indices of rows; one outside the matrix is an error of `torch.index_select`.
        width: integers in a row.

    Returns:
        The rows in the given order, in new memory.
    """
    first = rows * width
    # Every row takes as many words as the one that begins latest within its first word.
    words = -(-(width + (_WORD - 1 if width % _WORD else 0)) // _WORD)
    spread = torch.arange(words, device=rows.device)
    index = torch.minimum(first[:, None] // _WORD + spread, (first[:, None] + width - 1) // _WORD)
    taken = packed.view(-1, bits).index_select(0, index.flatten()).flatten()
    integers = unpack_integers(taken, bits, index.numel() * _WORD).view(len(rows), words * _WORD)
    if width % _WORD == 0:
        return integers
    return integers.gather(1, (first % _WORD)[:, None] + torch.arange(width, device=rows.device))


def _low_halves(width: int, bits: int) -> int:
    """Return a mask of the lower `width` integers of every 2 · `width` bytes, where the upper ones follow at once."""
    ones = 2 ** (width * bits) - 1
    return sum(ones << (8 * start) for start in range(0, _WORD, 2 * width))
