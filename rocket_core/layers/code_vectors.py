"""The two innermost loops of `row_kernels`, built from LLVM's vector operations, of 8 numbers each.

An output's integers follow one another, 8 in a word of `bits` bytes. LLVM does not find the vectors in loops over such
words, but translates its operations for every CPU. numba compiles these loops into the functions that call them, and
keeps those until their own file changes: after changing this one, touch row_kernels.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = 8
# Words of a block in which codes have the same number of bits, and of other frequent groups.
_BLOCK_WORDS = 8
_FREQUENT = (2, 4, 8)
# Sums of a block that are added up side by side, as an addition waits for the one before.
_SUMS = 2
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
    """Integers of 8, 4 or 2 bits, of which 8 bytes are read at once.

    Attributes:
        builder: of the loop.
        address: of the first word.
        words: words that are read at once, as many as a byte has integers. Vector `place` of them has the integers at
            this place of each byte.
    """

    builder: Any
    address: Any
    words: int

    @property
    def excess(self) -> int:
        """What integers exceed codes by; half of their range if it is subtracted from sums, which takes less time."""
        return 0 if self.words == 1 else 1 << (8 // self.words) >> 1

    def read(self, word: Any) -> list[Any]:
        """Return the integers from a word on as vectors of float32."""
        builder, vector, bits = self.builder, ir.VectorType(_I8, _WORD), 8 // self.words
        place = builder.inttoptr(builder.add(self.address, builder.mul(word, _I64(bits))), vector.as_pointer())
        read = builder.load(place, align=1)
        if self.words == 1:
            return [builder.sitofp(builder.xor(read, ir.Constant(vector, [-128] * _WORD)), _VECTOR)]
        wide = builder.zext(read, ir.VectorType(_I32, _WORD))
        mask = ir.Constant(wide.type, [(1 << bits) - 1] * _WORD)
        shifts = [ir.Constant(wide.type, [bits * place] * _WORD) for place in range(self.words)]
        return [builder.sitofp(builder.and_(builder.lshr(wide, shift), mask), _VECTOR) for shift in shifts]


class _Words:
    """The same for integers of any number of bits, a word of them at once and in order."""

    words, excess = 1, 0

    def __init__(self, builder: Any, address: Any, bits: Any) -> None:
        brief, one = builder.trunc(bits, _I32), _I32(1)
        half_word = _repeated(builder, builder.shl(bits, _I64(2)), 4)
        self._builder, self._address, self._bytes = builder, address, bits
        self._halves = builder.mul(half_word, ir.Constant(half_word.type, [0, 0, 1, 1]))
        places = _repeated(builder, brief, _WORD)
        self._places = builder.mul(places, ir.Constant(places.type, [0, 1, 2, 3, 0, 1, 2, 3]))
        self._mask = _repeated(builder, builder.sub(builder.shl(one, brief), one), _WORD)
        self._half = _repeated(builder, builder.shl(one, builder.sub(brief, one)), _WORD)

    def read(self, word: Any) -> list[Any]:
        """See `_Bytes.read`."""
        builder = self._builder
        place = builder.add(self._address, builder.mul(word, self._bytes))
        read = builder.load(builder.inttoptr(place, _I64.as_pointer()), align=1)
        halves = builder.lshr(_repeated(builder, read, 4), self._halves)
        parts = builder.bitcast(halves, self._mask.type)
        # The lower 32 bits of each half have its 4 integers.
        parts = _shuffled(builder, parts, [0, 0, 0, 0, 4, 4, 4, 4])
        integers = builder.and_(builder.lshr(parts, self._places), self._mask)
        return [builder.sitofp(builder.sub(integers, self._half), _VECTOR)]


class _Codes(NamedTuple):
    """The codes of an output, and its scales.

    Attributes:
        address: of the first word or block.
        bits: bits of a code; 0 if each block has a byte with its own number.
        in_byte: codes of a byte if all of them are read at once; 0 otherwise.
        words: number of words.
        block_words: words of a block.
        scales: address of the first scale.
        step: bytes from the scale of a block to the next; 0 if all have the same one.
    """

    address: Any
    bits: Any
    in_byte: Any
    words: Any
    block_words: Any
    scales: Any
    step: Any


def _for_blocks(builder: Any, codes: _Codes, in_bytes: tuple[int, ...], act: Callable[..., None]) -> None:
    """Do something for each block: with its words, from one of them on, its number, its first word, and their number.

    `in_bytes` are the possible values of `codes.in_byte`, next to 0. Loops over the words of a block are unrolled for
    frequent numbers of them, which are then no values of LLVM.
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
        sizes = [size for size in _FREQUENT if size % packed.words == 0]
        ways = {size: partial(visit, size, packed) for size in sizes}
        _by_value(builder, codes.block_words, ways, partial(visit, codes.block_words, packed))

    def visit_words() -> None:
        with builder.if_else(builder.icmp_signed("==", codes.bits, _I64(0))) as (in_blocks, as_on_disk):
            with in_blocks:
                visit(_BLOCK_WORDS)
            with as_on_disk:
                visit_packed(_Words(builder, codes.address, codes.bits))

    ways = {number: partial(visit_packed, _Bytes(builder, codes.address, number)) for number in in_bytes}
    _by_value(builder, codes.in_byte, ways, visit_words)


def _by_value(builder: Any, value: Any, acts: Mapping[int, Callable[[], None]], otherwise: Callable[[], None]) -> None:
    """Do what belongs to a value."""
    other, end = (builder.append_basic_block(name) for name in ("other", "end"))
    switch = builder.switch(value, other)
    for number in acts:
        switch.add_case(_I64(number), builder.append_basic_block("case"))
    blocks = [block for _, block in switch.cases]
    for block, act in zip([*blocks, other], [*acts.values(), otherwise], strict=True):
        builder.position_at_end(block)
        act()
        builder.branch(end)
    builder.position_at_end(end)


def _for_words(builder: Any, count: Any, step: int, act: Callable[[Any, int], None]) -> None:
    """Do something for each of some words that is a multiple of a step: with the word, and its number or 0."""
    if isinstance(count, int):
        for word in range(0, count, step):
            act(_I64(word), word)
        return
    with cgutils.for_range(builder, builder.udiv(count, _I64(step))) as loop:
        act(builder.mul(loop.index, _I64(step)), 0)


_CODE_TYPES = (types.uint64, types.int64, types.int64, types.int64, types.int64, types.uint64, types.int64)


@intrinsic
def dot(
    _context: Any, _a: Any, _b: Any, _i: Any, _w: Any, _bw: Any, _s: Any, _st: Any, _numbers: Any, _sums: Any
) -> Any:
    """Return Σ scale · Σ code · number over the blocks of an output.

    Numbers are in the order in which codes are read. Sums are of the numbers of each block, 8 for each: of every
    eighth number. They are used if integers exceed codes.
    """

    def build(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, (numbers, sums) = _Codes(*arguments[:7]), arguments[7:]
        zero = ir.Constant(_VECTOR, [0.0] * _WORD)
        total = cgutils.alloca_once_value(builder, zero)  # type: ignore[no-untyped-call]
        parts = [cgutils.alloca_once(builder, _VECTOR) for _ in range(_SUMS)]  # type: ignore[no-untyped-call]

        def add(words: Any, from_word: Any, block: Any, first: Any, count: Any) -> None:
            used = parts[: count if isinstance(count, int) else words.words]
            for part in used:
                builder.store(zero, part)
            if words.excess:
                less = ir.Constant(_VECTOR, [float(-words.excess)] * _WORD)
                builder.store(builder.fmul(less, builder.load(_vector_at(builder, sums, block), align=4)), used[0])

            def add_words(word: Any, number: int) -> None:
                for place, integers in enumerate(words.read(builder.add(from_word, word))):
                    index, part = builder.add(builder.add(first, word), _I64(place)), used[(number + place) % len(used)]
                    product = builder.fmul(
                        integers, builder.load(_vector_at(builder, numbers, index), align=4), flags=_CONTRACT
                    )
                    builder.store(builder.fadd(builder.load(part), product, flags=_CONTRACT), part)

            _for_words(builder, count, words.words, add_words)
            added = [builder.load(part) for part in used]
            while len(added) > 1:
                added = [builder.fadd(*pair) for pair in zip(added[::2], added[1::2], strict=True)]
            scaled = builder.fmul(added[0], _number_at(builder, codes.scales, block, codes.step), flags=_CONTRACT)
            builder.store(builder.fadd(builder.load(total), scaled, flags=_CONTRACT), total)

        _for_blocks(builder, codes, (1, 2, 4), add)
        vector = builder.load(total)
        for size in (4, 2, 1):
            upper = _shuffled(builder, vector, list(range(size, 2 * size)))
            vector = builder.fadd(_shuffled(builder, vector, list(range(size))), upper)
        return builder.extract_element(vector, _I32(0))

    return types.float32(*_CODE_TYPES, types.uint64, types.uint64), build


@intrinsic
def unpack(
    _context: Any, _a: Any, _b: Any, _i: Any, _w: Any, _bw: Any, _s: Any, _st: Any, _out: Any, _brief: Any
) -> Any:
    """Write scale · code for the blocks of an output, as float32 or bfloat16."""

    def build(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, (out, brief) = _Codes(*arguments[:7]), arguments[7:]

        def write(words: Any, from_word: Any, block: Any, first: Any, count: Any) -> None:
            scale = _number_at(builder, codes.scales, block, codes.step)

            def write_word(word: Any, _number: int) -> None:
                [integers] = words.read(builder.add(from_word, word))
                values, place = builder.fmul(integers, scale), builder.add(first, word)
                with builder.if_else(brief) as (as_bfloat16, as_float32):
                    with as_bfloat16:
                        short, address = _bfloat16(builder, values), builder.add(out, builder.shl(place, _I64(4)))
                        builder.store(short, builder.inttoptr(address, short.type.as_pointer()), align=2)
                    with as_float32:
                        builder.store(values, _vector_at(builder, out, place), align=4)

            _for_words(builder, count, 1, write_word)

        _for_blocks(builder, codes, (1,), write)
        return target.get_dummy_value()

    return types.void(*_CODE_TYPES, types.uint64, types.boolean), build


def _bfloat16(builder: Any, values: Any) -> Any:
    """Return the bits of finite numbers that are rounded to bfloat16, between two of its numbers to the even one."""
    bits = builder.bitcast(values, ir.VectorType(_I32, _WORD))
    sixteen, one, half = (ir.Constant(bits.type, [number] * _WORD) for number in (16, 1, 0x7FFF))
    rounded = builder.add(builder.add(bits, half), builder.and_(builder.lshr(bits, sixteen), one))
    return builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(_I16, _WORD))
