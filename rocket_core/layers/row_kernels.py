"""Loops that compute from packed integers on a CPU, compiled by numba for its vectors when first called.

An output's integers follow one another, 8 in a word of `bits` bytes. LLVM does not find the vectors in loops over such
words, so the two innermost loops are built from its vector operations, of 8 numbers each, which it translates for
every CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rocket_core.linalg.kernels.on_cpu import compiled

PADDING = 8
"""Bytes after a word that may be read with it."""

_WORD = 8
# Words of a block in which codes have the same number of bits, and of other frequent groups.
_BLOCK_WORDS = 8
_FREQUENT = (2, 8)
_POSITIVE = 2**62 - 1
_I8, _I16, _I32, _I64, _F32 = *(ir.IntType(size) for size in (8, 16, 32, 64)), ir.FloatType()
_VECTOR = ir.VectorType(_F32, _WORD)
_CONTRACT = ("contract",)


def _shuffled(builder: Any, vector: Any, places: list[int]) -> Any:
    undefined = ir.Constant(vector.type, ir.Undefined)
    return builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _repeated(builder: Any, value: Any, count: int) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _I32(0))
    return _shuffled(builder, one, [0] * count)


def _vector_at(builder: Any, address: Any, index: Any) -> Any:
    return builder.inttoptr(builder.add(address, builder.shl(index, _I64(5))), _VECTOR.as_pointer())


def _number_at(builder: Any, address: Any, index: Any, step: Any) -> Any:
    """Return a float32 from an address, in all places of a vector."""
    place = builder.inttoptr(builder.add(address, builder.mul(index, step)), _F32.as_pointer())
    return _repeated(builder, builder.load(place), _WORD)


class _Bytes(NamedTuple):
    """Words of 8 integers of 8 bits each, less half of their range, as vectors of float32."""

    builder: Any
    address: Any

    def read(self, index: Any) -> Any:
        builder, vector = self.builder, ir.VectorType(_I8, _WORD)
        place = builder.inttoptr(builder.add(self.address, builder.shl(index, _I64(3))), vector.as_pointer())
        word = builder.load(place, align=1)
        return builder.sitofp(builder.xor(word, ir.Constant(vector, [-128] * _WORD)), _VECTOR)


class _Words:
    """The same for integers of any number of bits."""

    def __init__(self, builder: Any, address: Any, bits: Any) -> None:
        brief, one = builder.trunc(bits, _I32), _I32(1)
        half_word = _repeated(builder, builder.shl(bits, _I64(2)), 4)
        self._builder, self._address, self._bytes = builder, address, bits
        self._halves = builder.mul(half_word, ir.Constant(half_word.type, [0, 0, 1, 1]))
        places = _repeated(builder, brief, _WORD)
        self._places = builder.mul(places, ir.Constant(places.type, [0, 1, 2, 3, 0, 1, 2, 3]))
        self._mask = _repeated(builder, builder.sub(builder.shl(one, brief), one), _WORD)
        self._half = _repeated(builder, builder.shl(one, builder.sub(brief, one)), _WORD)

    def read(self, index: Any) -> Any:
        builder = self._builder
        place = builder.add(self._address, builder.mul(index, self._bytes))
        word = builder.load(builder.inttoptr(place, _I64.as_pointer()), align=1)
        halves = builder.lshr(_repeated(builder, word, 4), self._halves)
        parts = builder.bitcast(halves, self._mask.type)
        # The lower 32 bits of each half have its 4 integers.
        parts = _shuffled(builder, parts, [0, 0, 0, 0, 4, 4, 4, 4])
        integers = builder.and_(builder.lshr(parts, self._places), self._mask)
        return builder.sitofp(builder.sub(integers, self._half), _VECTOR)


class _Codes(NamedTuple):
    """The codes of an output, and its scales.

    Attributes:
        address: of the first word or block.
        bits: bits of a code; 0 if each block has a byte with its own number.
        words: number of words.
        block_words: words of a block.
        scales: address of the first scale.
        step: bytes from the scale of a block to the next; 0 if all have the same one.
    """

    address: Any
    bits: Any
    words: Any
    block_words: Any
    scales: Any
    step: Any


def _for_blocks(builder: Any, codes: _Codes, act: Callable[..., None]) -> None:
    """Do something for each block: with its words, from one of them on, its number, its first word, and their number.

    Loops over the words of a block are unrolled for frequent numbers of them, which are then no values of LLVM.
    """

    def visit(size: Any, packed: _Bytes | _Words | None = None) -> None:
        place = cgutils.alloca_once_value(builder, codes.address)  # type: ignore[no-untyped-call]
        length = _I64(size) if isinstance(size, int) else size

        def visit_block(block: Any, count: Any) -> None:
            first = builder.mul(block, length)
            if packed is not None:
                act(packed, first, block, first, count)
                return
            start = builder.load(place)
            width = builder.zext(builder.load(builder.inttoptr(start, _I8.as_pointer())), _I64)
            begin = builder.add(start, _I64(1))
            builder.store(builder.add(begin, builder.mul(width, length)), place)
            act(_Words(builder, begin, width), _I64(0), block, first, count)

        whole = builder.udiv(codes.words, length)
        with cgutils.for_range(builder, whole) as loop:
            visit_block(loop.index, size)
        rest = builder.sub(codes.words, builder.mul(whole, length))
        with builder.if_then(builder.icmp_signed(">", rest, _I64(0))):
            visit_block(whole, rest)

    def visit_packed(packed: _Bytes | _Words) -> None:
        other, end = (builder.append_basic_block(name) for name in ("other", "end"))
        switch = builder.switch(codes.block_words, other)
        for size in _FREQUENT:
            switch.add_case(_I64(size), builder.append_basic_block("frequent"))
        for size, (_, frequent) in zip(_FREQUENT, switch.cases, strict=True):
            builder.position_at_end(frequent)
            visit(size, packed)
            builder.branch(end)
        builder.position_at_end(other)
        visit(codes.block_words, packed)
        builder.branch(end)
        builder.position_at_end(end)

    with builder.if_else(builder.icmp_signed("==", codes.bits, _I64(0))) as (in_blocks, as_on_disk):
        with in_blocks:
            visit(_BLOCK_WORDS)
        with as_on_disk, builder.if_else(builder.icmp_signed("==", codes.bits, _I64(8))) as (as_bytes, as_words):
            with as_bytes:
                visit_packed(_Bytes(builder, codes.address))
            with as_words:
                visit_packed(_Words(builder, codes.address, codes.bits))


def _for_words(builder: Any, count: Any, act: Callable[[Any], None]) -> None:
    """Do something for each of some words."""
    if isinstance(count, int):
        for index in range(count):
            act(_I64(index))
        return
    with cgutils.for_range(builder, count) as loop:
        act(loop.index)


_CODES = (types.uint64, types.int64, types.int64, types.int64, types.uint64, types.int64)


@intrinsic
def _dot(_context: Any, _a: Any, _b: Any, _w: Any, _bw: Any, _s: Any, _st: Any, _numbers: Any) -> Any:
    """Return Σ scale · Σ code · number over the blocks of an output."""

    def build(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, numbers = _Codes(*arguments[:6]), arguments[6]
        zero = ir.Constant(_VECTOR, [0.0] * _WORD)
        total = cgutils.alloca_once_value(builder, zero)  # type: ignore[no-untyped-call]
        part = cgutils.alloca_once(builder, _VECTOR)  # type: ignore[no-untyped-call]

        def add(words: Any, from_word: Any, block: Any, first: Any, count: Any) -> None:
            builder.store(zero, part)

            def add_word(index: Any) -> None:
                number = builder.load(_vector_at(builder, numbers, builder.add(first, index)), align=4)
                product = builder.fmul(words.read(builder.add(from_word, index)), number, flags=_CONTRACT)
                builder.store(builder.fadd(builder.load(part), product, flags=_CONTRACT), part)

            _for_words(builder, count, add_word)
            scaled = builder.fmul(
                builder.load(part), _number_at(builder, codes.scales, block, codes.step), flags=_CONTRACT
            )
            builder.store(builder.fadd(builder.load(total), scaled, flags=_CONTRACT), total)

        _for_blocks(builder, codes, add)
        vector = builder.load(total)
        for size in (4, 2, 1):
            upper = _shuffled(builder, vector, list(range(size, 2 * size)))
            vector = builder.fadd(_shuffled(builder, vector, list(range(size))), upper)
        return builder.extract_element(vector, _I32(0))

    return types.float32(*_CODES, types.uint64), build


@intrinsic
def _unpack(_context: Any, _a: Any, _b: Any, _w: Any, _bw: Any, _s: Any, _st: Any, _out: Any, _brief: Any) -> Any:
    """Write scale · code for the blocks of an output, as float32 or bfloat16."""

    def build(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, (out, brief) = _Codes(*arguments[:6]), arguments[6:]

        def write(words: Any, from_word: Any, block: Any, first: Any, count: Any) -> None:
            scale = _number_at(builder, codes.scales, block, codes.step)

            def write_word(index: Any) -> None:
                values = builder.fmul(words.read(builder.add(from_word, index)), scale)
                place = builder.add(first, index)
                with builder.if_else(brief) as (as_bfloat16, as_float32):
                    with as_bfloat16:
                        short, address = _bfloat16(builder, values), builder.add(out, builder.shl(place, _I64(4)))
                        builder.store(short, builder.inttoptr(address, short.type.as_pointer()), align=2)
                    with as_float32:
                        builder.store(values, _vector_at(builder, out, place), align=4)

            _for_words(builder, count, write_word)

        _for_blocks(builder, codes, write)
        return target.get_dummy_value()

    return types.void(*_CODES, types.uint64, types.boolean), build


def _bfloat16(builder: Any, values: Any) -> Any:
    """Return the bits of finite numbers that are rounded to bfloat16, between two of its numbers to the even one."""
    bits = builder.bitcast(values, ir.VectorType(_I32, _WORD))
    sixteen, one, half = (ir.Constant(bits.type, [number] * _WORD) for number in (16, 1, 0x7FFF))
    rounded = builder.add(builder.add(bits, half), builder.and_(builder.lshr(bits, sixteen), one))
    return builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(_I16, _WORD))


@compiled
def _read_scales(scales: Any, bits: int, values: Any, unit: float, output: int, group_blocks: int, found: Any) -> None:
    """Write the scale of every block of an output, given the value of every code of a scale."""
    groups = -(-len(found) // group_blocks)
    number = output * groups
    for group in range(groups):
        # The compiler leaves out tests of indices that cannot be negative.
        if bits == 16:
            place = (2 * number) & _POSITIVE
            code = np.int64(scales[place]) | np.int64(scales[place + 1]) << 8
        elif bits == 8:
            code = np.int64(scales[number & _POSITIVE])
        else:
            bit = 6 * number
            place = (bit >> 3) & _POSITIVE
            both = np.int64(scales[place]) | np.int64(scales[min(place + 1, len(scales) - 1)]) << 8
            code = (both >> (bit & 7)) & 63
        value = values[code] * unit
        if group_blocks == 1:
            found[group] = value
        else:
            found[group * group_blocks : (group + 1) * group_blocks] = value
        number += 1


@compiled
def _blocks_of(inputs: int, group_size: int) -> Any:
    """Return the words of a block, the blocks of a group, and room for the scale of each block, or of all."""
    if group_size >= inputs:
        return np.int64(8), 1, np.empty(1, np.float32)
    words = 8 if group_size % 64 == 0 else group_size // 8
    return np.int64(words), group_size // (8 * words), np.empty(-(-inputs // (8 * words)), np.float32)


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
    words = np.int64(rows.shape[1] // 8)
    block_words, group_blocks, found = _blocks_of(rows.shape[1], group_size)
    step = np.int64(0 if len(found) == 1 else 4)
    ending = _ending(codes, words * bits)
    for output in range(first, last):
        _read_scales(scales, scale_bits, values, unit, output, group_blocks, found)
        begin = _begin(codes, starts, ending, output, words * bits)
        for row in range(len(rows)):
            numbers, used = np.uint64(rows[row].ctypes.data), np.uint64(found.ctypes.data)
            product: Any = _dot(begin, np.int64(bits), words, block_words, used, step, numbers)  # type: ignore[call-arg]
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
    words = np.int64(weight.shape[1] // 8)
    block_words, group_blocks, found = _blocks_of(weight.shape[1], group_size)
    step = np.int64(0 if len(found) == 1 else 4)
    ending = _ending(codes, words * bits)
    for output in range(first, first + len(weight)):
        _read_scales(scales, scale_bits, values, unit, output, group_blocks, found)
        begin = _begin(codes, starts, ending, output, words * bits)
        out, used = np.uint64(weight[output - first].ctypes.data), np.uint64(found.ctypes.data)
        brief = weight.itemsize == 2
        _unpack(begin, np.int64(bits), words, block_words, used, step, out, brief)  # type: ignore[call-arg]


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
