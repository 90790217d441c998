"""Codes that a CPU computes with as they are on disk, output after output; entropy-coded ones in blocks of few bits."""

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32, Int8, UInt8
from torch import Tensor

from rocket_core.layers.code_tensors import unpack_outputs
from rocket_core.layers.packing import pack_integers, unpack_integers
from rocket_core.linalg.integer_codes import scale_values
from rocket_core.sizes.budget import packed_bytes
from rocket_core.sizes.code_format import CodeBits, CodeFormat, ScaleBits
from rocket_core.system.devices import multiplies_bfloat16

_WORD = 8
# With more rows of input it is faster to multiply with the decoded weight. Measured on one core with AVX2.
_MOST_ROWS = 3
# Numbers of the part of the weight that is decoded at a time, which the second cache holds.
_DECODED = 2**18
# Multiplying with fewer codes takes less time than waking up threads.
_CODES_PER_THREAD = 2**18
# Inputs of a block.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The arrangement of a layer's codes, in which those of an output follow one another.

    Packed codes are the bytes on disk. Codes that are entropy coded there have blocks of 64 inputs, each with as many
    bits as its codes need: see `row_kernels.write_blocks`. Before the blocks is where each output starts, as int64.

    Attributes:
        d_in: inputs.
        d_out: outputs.
        bits: bits of a code; 0 for blocks.
        group_size: inputs that share a scale, at most d_in.
        scale_bits: bits of a scale.
        exponent: see `Scales.exponent`.
    """

    d_in: int
    d_out: int
    bits: CodeBits | Literal[0]
    group_size: int
    scale_bits: ScaleBits
    exponent: int

    @classmethod
    def of(
        cls, shape: tuple[int, int], code_format: CodeFormat, exponent: int, *, entropy_coded: bool = False
    ) -> "RowLayout":
        """Return the layout for a layer."""
        d_in, d_out = shape
        group_size = min(code_format.group_size, d_in)
        layout = cls(d_in, d_out, code_format.bits, group_size, code_format.scale_bits, exponent)
        in_blocks = entropy_coded and group_size == d_in and layout._compiled
        return cls(d_in, d_out, 0, group_size, code_format.scale_bits, exponent) if in_blocks else layout

    @property
    def numbers(self) -> list[int]:
        """The attributes, in order."""
        return [self.d_in, self.d_out, self.bits, self.group_size, self.scale_bits, self.exponent]

    @property
    def most_bytes(self) -> int:
        """An upper bound on the bytes of a table; exact unless codes are in blocks."""
        if self.bits:
            return packed_bytes(self.d_in * self.d_out, self.bits)
        return self.d_out * (_WORD + self.d_in + -(-self.d_in // _BLOCK)) + 2 * _WORD

    def fill(self, codes: Int8[Tensor, "d_in d_out"]) -> UInt8[Tensor, " bytes"]:
        """Return the table of codes, in new memory."""
        rows = codes.T.contiguous()
        if self.bits:
            return pack_integers(rows.view(torch.uint8).flatten() + (1 << self.bits >> 1), self.bits)
        starts = torch.zeros(self.d_out + 1, dtype=torch.int64)
        starts[0] = starts.nbytes
        kernels, arrays = _kernels(), (rows.numpy(), starts.numpy())
        kernels.write_blocks(*arrays, starts.view(torch.uint8).numpy(), True)
        table = torch.zeros(int(starts[-1]) + kernels.PADDING, dtype=torch.uint8)
        kernels.write_blocks(*arrays, table.numpy(), False)
        table[: starts.nbytes] = starts.view(torch.uint8)
        return table

    def codes(self, table: UInt8[Tensor, " bytes"]) -> Int8[Tensor, "d_in d_out"]:
        """Return the codes in a table; the inverse of `fill`."""
        if self.bits:
            unsigned = unpack_integers(table, self.bits, self.d_in * self.d_out) - (1 << self.bits >> 1)
            return unsigned.view(torch.int8).view(self.d_out, self.d_in).T
        weight = torch.empty(self.d_out, self.d_in)
        # All scales are the only value.
        scales, one = torch.zeros(self.d_out, dtype=torch.uint8), torch.ones(1)
        _kernels().decode(*self._tables(table), scales.numpy(), 8, one.numpy(), 1.0, self.d_in, 0, weight.numpy())
        return weight.to(torch.int8).T

    def multiply(
        self, rows: Float[Tensor, "n d_in"], table: UInt8[Tensor, " bytes"], scales: UInt8[Tensor, " scale_bytes"]
    ) -> Float32[Tensor, "n d_out"]:
        """Return `rows @ W̃`, added up in float32.

        A few rows are multiplied one by one with the codes, more of them with the weight, of which a part is decoded at
        a time: in bfloat16 if that is the dtype of the rows, and the CPU multiplies it.
        """
        if len(rows) > _MOST_ROWS or not self._compiled:
            return self._multiply_decoded(rows, table, scales)
        given, products = rows.float().contiguous(), torch.empty(len(rows), self.d_out)
        arguments = (*self._tables(table), *self._scales(scales), given.numpy(), products.numpy())
        _in_threads(self.d_out, self.d_in * len(rows), lambda first, last: _kernels().multiply(*arguments, first, last))
        return products

    def _multiply_decoded(self, rows: Tensor, table: Tensor, scales: Tensor) -> Float32[Tensor, "n d_out"]:
        brief = rows.dtype == torch.bfloat16 and multiplies_bfloat16()
        rows = rows if brief else rows.float()
        products, size = rows.new_empty(len(rows), self.d_out), max(1, _DECODED // self.d_in)
        weight = rows.new_empty(min(size, self.d_out), self.d_in)
        for first in range(0, self.d_out, size):
            part = weight[: self.d_out - first]
            self._decode(table, scales, first, part)
            torch.mm(rows, part.T, out=products[:, first : first + len(part)])
        return products.float()

    def _decode(self, table: Tensor, scales: Tensor, first: int, weight: Tensor) -> None:
        """Write the weight of some outputs, from the first one on."""
        if not self._compiled:
            outputs = torch.arange(first, first + len(weight), device=table.device)
            rounded = unpack_outputs(table, scales, outputs, self.d_in, self._format, self.exponent)
            weight.copy_(rounded.rows(weight.dtype))
            return
        numbers = (weight.view(torch.int16) if weight.itemsize == 2 else weight).numpy()
        arguments = (*self._tables(table), *self._scales(scales))
        _in_threads(
            len(weight),
            self.d_in,
            lambda begin, end: _kernels().decode(*arguments, first + begin, numbers[begin:end]),
        )

    def _tables(self, table: Tensor) -> tuple[Any, ...]:
        """Return the arguments of kernels that describe codes."""
        starts = table[: 0 if self.bits else 8 * self.d_out].view(torch.int64)
        return table.numpy(), starts.numpy(), self.bits

    def _scales(self, scales: Tensor) -> tuple[Any, ...]:
        """Return the arguments of kernels that describe scales."""
        values, unit = scale_values(self.exponent, self._format)
        return scales.numpy(), self.scale_bits, values.numpy(), unit, self.group_size

    @property
    def _format(self) -> CodeFormat:
        return CodeFormat(bits=self.bits or 8, group_size=self.group_size, scale_bits=self.scale_bits)

    @property
    def _compiled(self) -> bool:
        """Whether the kernels compute it: outputs and groups have whole words, and an output has 8 bytes."""
        whole = self.d_in % _WORD == 0 and self.group_size % _WORD == 0
        return whole and self.d_in * (self.bits or _WORD) >= _WORD * _WORD and _kernels() is not None


@cache
def _kernels() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from rocket_core.layers import row_kernels

    return row_kernels


def _in_threads(outputs: int, codes: int, act: Callable[[int, int], object]) -> None:
    """Do something for ranges of outputs, each with some codes, in threads if that takes longer than waking them."""
    threads = torch.get_num_threads()
    parts = min(threads, outputs, outputs * codes // _CODES_PER_THREAD)
    if parts <= 1:
        act(0, outputs)
        return
    bounds = [outputs * part // parts for part in range(parts + 1)]
    list(_pool(os.getpid(), threads).map(act, bounds[:-1], bounds[1:]))


@cache
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads of this process, as those of its parent do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rocket-codes")


def multiply(layout: RowLayout, rows: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Return `rows @ W̃` in float32, as one operation for `torch.compile`."""
    if torch.compiler.is_compiling():
        product: Tensor = multiply_codes(rows, table, scales, layout.numbers)
        return product
    return layout.multiply(rows, table, scales)


@torch.library.custom_op("rocket::multiply_codes", mutates_args=())
def multiply_codes(rows: Tensor, table: Tensor, scales: Tensor, layout: list[int]) -> Tensor:
    """Multiply as `multiply` does."""
    return RowLayout(*layout).multiply(rows, table, scales).contiguous()  # type: ignore[arg-type]


@multiply_codes.register_fake
def _product_of_codes(rows: Tensor, _table: Tensor, _scales: Tensor, layout: list[int]) -> Tensor:
    _, d_out, *_ = layout
    return rows.new_empty(rows.shape[0], d_out, dtype=torch.float32)
