"""Loops that compute from packed integers on a CPU, compiled by numba for its vectors when first called."""

from typing import Any

import numpy as np

from rocket_core.layers.code_vectors import dot, unpack
from rocket_core.linalg.kernels.on_cpu import compiled

PADDING = 8
"""Bytes after a word that may be read with it."""

# Scales of 6 bits are read 4 at a time, from 3 bytes.
_SCALES, _BYTES = 4, 3


@compiled
def _sizes(inputs: int, group_size: int) -> Any:
    """Return the words of an output and of a block, its groups, and the blocks of a group."""
    if group_size >= inputs:
        return np.int64(inputs // 8), np.int64(8), 1, 1
    block = 8 if group_size % 64 == 0 else group_size // 8
    return np.int64(inputs // 8), np.int64(block), -(-inputs // group_size), group_size // (8 * block)


@compiled
def _read_scales(scales: Any, bits: int, values: Any, unit: float, output: int, blocks: int, room: Any) -> Any:
    """Write the scale of every block of an output, given the value of every code of a scale; return its address.

    LLVM finds vectors in these loops, as they are over parts of arrays. There is room for what is read in excess, and
    for the scales once more if there are several blocks in a group.
    """
    count = len(room) // (1 + blocks) - 2 * _SCALES
    first, skipped = output * count, 0
    if bits == 6:
        skipped = first % _SCALES
        packed = scales[_BYTES * (first // _SCALES) :]
        _read_six(packed, values, unit, skipped + count, room)
    elif bits == 16:
        halves = scales.view(np.uint16)[first : first + count]
        for place in range(count):
            room[place] = values[halves[place]] * unit
    else:
        codes = scales[first : first + count]
        for place in range(count):
            room[place] = values[codes[place]] * unit
    if blocks == 1:
        return np.uint64(room[skipped:].ctypes.data)
    repeated = room[count + 2 * _SCALES :]
    for place in range(count):
        repeated[place * blocks : (place + 1) * blocks] = room[skipped + place]
    return np.uint64(repeated.ctypes.data)


@compiled
def _read_six(packed: Any, values: Any, unit: float, count: int, room: Any) -> None:
    """Write the first scales of 6 bits, in whole steps."""
    steps, whole = -(-count // _SCALES), len(packed) // _BYTES
    for step in range(min(steps, whole)):
        _read_step(packed[_BYTES * step :], values, unit, room[_SCALES * step :])
    if whole < steps:
        ending = np.zeros(_BYTES, np.uint8)
        ending[: len(packed) - _BYTES * whole] = packed[_BYTES * whole :]
        _read_step(ending, values, unit, room[_SCALES * whole :])


@compiled
def _read_step(packed: Any, values: Any, unit: float, room: Any) -> None:
    low, middle, high = packed[0], packed[1], packed[2]
    room[0] = values[low & 63] * unit
    room[1] = values[low >> 6 | (middle & 15) << 2] * unit
    room[2] = values[middle >> 4 | (high & 3) << 4] * unit
    room[3] = values[high >> 2] * unit


@compiled
def _arranged(rows: Any, in_byte: int, block_words: int) -> Any:
    """Return rows and sums as `dot` takes them.

    If all codes of a byte are read at once, of 8 bytes those at the first place come first.
    """
    words = rows.shape[1] // 8
    sums = np.zeros((len(rows), 8 * -(-words // block_words)), np.float32)
    if in_byte <= 1:
        return rows, sums
    arranged = np.empty_like(rows)
    for row in range(len(rows)):
        for word in range(words):
            place, first = word % in_byte, 8 * (word - word % in_byte)
            for number in range(8):
                value = rows[row, first + in_byte * number + place]
                arranged[row, 8 * word + number] = value
                sums[row, 8 * (word // block_words) + number] += value
    return arranged, sums


@compiled
def multiply(
    codes: Any,
    starts: Any,
    bits: int,
    scales: Any,
    scale_bits: int,
    values: Any,
    unit: float,
    group_size: int,
    rows: Any,
    products: Any,
    first: int,
    last: int,
) -> None:
    """Multiply rows with some outputs.

    Args:
        codes: the table; see `RowLayout`.
        starts: where the blocks of each output are; unused if codes are not in blocks.
        bits: bits of a code; 0 for blocks, which have one group.
        scales: packed scales.
        scale_bits: bits of a scale.
        values: a number for each code of a scale.
        unit: what that is multiplied with.
        group_size: inputs that share a scale.
        rows: what to multiply.
        products: where the products go.
        first: the first output.
        last: the output after the last.
    """
    words, block_words, groups, blocks = _sizes(rows.shape[1], group_size)
    room, step = np.empty((groups + 2 * _SCALES) * (1 + blocks), np.float32), np.int64(0 if groups == 1 else 4)
    ending = _ending(codes, words * bits)
    in_byte = np.int64(8 // bits if bits in (2, 4, 8) else 0)
    if in_byte and (words % in_byte or block_words % in_byte):
        in_byte = np.int64(0)
    numbers, sums = _arranged(rows, in_byte, block_words)
    for output in range(first, last):
        used = _read_scales(scales, scale_bits, values, unit, output, blocks, room)
        begin = _begin(codes, starts, ending, output, words * bits)
        for row in range(len(rows)):
            given = np.uint64(numbers[row].ctypes.data), np.uint64(sums[row].ctypes.data)
            product: Any = dot(begin, np.int64(bits), in_byte, words, block_words, used, step, *given)  # type: ignore[call-arg]
            products[row, output] = product


@compiled
def decode(
    codes: Any,
    starts: Any,
    bits: int,
    scales: Any,
    scale_bits: int,
    values: Any,
    unit: float,
    group_size: int,
    first: int,
    weight: Any,
) -> None:
    """Write the weight of some outputs, from the first one on, as float32, or as bfloat16 in integers of 16 bits.

    The arguments are those of `multiply`.
    """
    words, block_words, groups, blocks = _sizes(weight.shape[1], group_size)
    room, step = np.empty((groups + 2 * _SCALES) * (1 + blocks), np.float32), np.int64(0 if groups == 1 else 4)
    ending = _ending(codes, words * bits)
    brief, in_byte = weight.itemsize == 2, np.int64(bits == 8)
    for output in range(first, first + len(weight)):
        used = _read_scales(scales, scale_bits, values, unit, output, blocks, room)
        begin = _begin(codes, starts, ending, output, words * bits)
        out = np.uint64(weight[output - first].ctypes.data)
        unpack(begin, np.int64(bits), in_byte, words, block_words, used, step, out, brief)  # type: ignore[call-arg]


@compiled
def _ending(codes: Any, row_bytes: int) -> Any:
    """Return the codes of the last output with bytes after them that may be read."""
    ending = np.zeros(row_bytes + 8, np.uint8)
    ending[:row_bytes] = codes[len(codes) - row_bytes :]
    return ending


@compiled
def _begin(codes: Any, starts: Any, ending: Any, output: int, row_bytes: int) -> Any:
    """Return the address of an output's codes."""
    if row_bytes == 0:
        return np.uint64(codes.ctypes.data + starts[output])
    place = output * row_bytes
    return np.uint64(codes.ctypes.data + place if place + row_bytes < len(codes) else ending.ctypes.data)


@compiled
def write_blocks(codes: Any, starts: Any, packed: Any, is_counting: bool) -> None:
    """Write codes, output after output, in blocks: the number of bits of its codes, and these; and where outputs start.

    Args:
        codes: `(d_out, d_in)`.
        starts: `d_out + 1` numbers, written if bytes are counted, read otherwise.
        packed: where the blocks go, unless bytes are counted only.
        is_counting: whether only starts are written.
    """
    outputs, inputs = codes.shape
    for output in range(outputs):
        place = starts[output]
        for first in range(0, inputs, 64):
            block = codes[output, first : first + 64]
            width, most = 2, np.int64(0)
            for code in block:
                most = max(most, np.int64(code), -np.int64(code) - 1)
            while most >= 1 << (width - 1):
                width += 1
            if not is_counting:
                packed[place] = width
                word, filled, begin = np.int64(0), 0, place + 1
                for code in block:
                    word |= (np.int64(code) + (1 << (width - 1))) << filled
                    filled += width
                    while filled >= 8:
                        packed[begin] = word & 255
                        word, filled, begin = word >> 8, filled - 8, begin + 1
            place += 1 + width * len(block) // 8
        if is_counting:
            starts[output + 1] = place
