"""Tables of 4-bit codes that torch's kernel for int4 weights multiplies with, on x86 CPUs and in bfloat16.

The kernel reads each code once, multiplies it with its scale and adds up in float32. It is faster than the kernels of
`RowLayout`, but reads scales in bfloat16 only, for groups of 32 inputs at least. So a scale is rounded once, by at
most 2^-8 of it, which is also the most by which rounding to bfloat16 changes an entry of the dense weight.

Codes of 8 bits are `16 h + l`, with h and l of 4 bits. They are a layer with twice as many inputs, each given
twice, whose scales are `16 s` for h and `s` for l.
"""

import sys
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import BFloat16, Int8, UInt8
from torch import Tensor

from rocket_core.linalg.integer_codes import Scales
from rocket_core.sizes.code_format import CodeFormat
from rocket_core.system.devices import multiplies_bfloat16

_KERNEL_BITS = 4
# What the kernel subtracts from the codes that it reads.
_HALF = 1 << (_KERNEL_BITS - 1)
_GROUPS = (256, 128, 64, 32)
# Codes in two parts have two scales, so that smaller groups take much more memory than on disk.
_LEAST_GROUP_OF_TWO = 64
# Outputs that the kernel computes at a time, by instruction set; without these it has no vector code.
_BLOCKS = {"AVX2": 32, "AVX512": 64}
# With more rows of input, counted once for each part, it is faster to multiply with the decoded weight.
_MOST_ROWS = 64
# Outputs that are packed at a time, from integers of 4 bytes.
_PACKED_OUTPUTS = 1024
# Bytes of the part of the weight that is decoded at a time.
_DECODED_BYTES = 2**21


@cache
def kernel_outputs() -> int | None:
    """Return the outputs that the kernel computes at a time on this CPU; None if it has no vector code for it."""
    if sys.platform == "win32":
        return None
    return _BLOCKS.get(torch.backends.cpu.get_cpu_capability())


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """The arrangement of a layer's codes in a table of bytes that the kernel reads.

    The outputs are divided into blocks, the last one filled up with zeros. A block has a row for every input: the codes
    of its outputs plus 8, two in a byte: one of the first half of the block in the lower bits, one of the second above.

    Attributes:
        d_in: inputs.
        d_out: outputs.
        group_size: inputs that share a scale in the kernel.
        repeats: groups of the kernel that share a scale of the layer.
        parts: parts of a code: 1 if it has at most 4 bits, else 2.
        block: outputs of a block.
    """

    d_in: int
    d_out: int
    group_size: int
    repeats: int
    parts: int
    block: int

    @classmethod
    def of(cls, shape: tuple[int, int], code_format: CodeFormat, dtype: torch.dtype) -> "Int4Layout | None":
        """Return the layout for a layer that computes in a dtype; None if the kernel cannot compute it, or slowly."""
        d_in, d_out = shape
        block, shared = kernel_outputs(), min(code_format.group_size, d_in)
        sizes = [size for size in _GROUPS if shared % size == 0 and d_in % size == 0]
        # Other codes would take more memory than on disk.
        if block is None or dtype != torch.bfloat16 or code_format.bits % _KERNEL_BITS or not sizes:
            return None
        parts = -(-code_format.bits // _KERNEL_BITS)
        if parts > 1 and (block < _BLOCKS["AVX512"] or sizes[0] < _LEAST_GROUP_OF_TWO):
            return None
        return cls(d_in, d_out, sizes[0], shared // sizes[0], parts, block)

    @property
    def numbers(self) -> list[int]:
        """The attributes, in order."""
        return [self.d_in, self.d_out, self.group_size, self.repeats, self.parts, self.block]

    @property
    def most_bytes(self) -> int:
        """Bytes of a table and of its scales, which come with zero points."""
        return self._filled * self.parts * (self.d_in // 2 + self._groups * 2 * torch.bfloat16.itemsize)

    def fill(self, codes: Int8[Tensor, "d_in d_out"]) -> UInt8[Tensor, "outputs bytes"]:
        """Return the table of codes, in new memory."""
        parts = codes if self.parts == 1 else torch.cat([codes >> _KERNEL_BITS, (codes & 15) - _HALF])
        packed = []
        for first in range(0, self._filled, _PACKED_OUTPUTS):
            outputs = min(_PACKED_OUTPUTS, self._filled - first)
            unsigned = torch.full((outputs, len(parts)), _HALF, dtype=torch.int32, device=codes.device)
            given = parts[:, first : first + outputs].T
            unsigned[: len(given)] += given
            packed.append(torch._convert_weight_to_int4pack_for_cpu(unsigned, 1))
        return torch.cat(packed)

    def codes(self, table: UInt8[Tensor, "outputs bytes"]) -> Int8[Tensor, "d_in d_out"]:
        """Return the codes in a table; the inverse of `fill`."""
        return self._unpack(table).transpose(0, 1).flatten(1)[:, : self.d_out].contiguous()

    def scales(self, scales: Scales) -> BFloat16[Tensor, "groups outputs two"]:
        """Return scale and zero point of every group of the kernel; those of outputs that fill up are zero."""
        values = scales.values(torch.float32).repeat_interleave(self.repeats, dim=0)
        both = values.new_zeros(self.parts, self._groups, self._filled, 2, dtype=torch.bfloat16)
        both[-1, :, : self.d_out, 0] = values[: self._groups]
        if self.parts > 1:
            # Powers of two round nothing. The lower part has no sign, so that what the kernel subtracts is added again.
            both[0] = 2**_KERNEL_BITS * both[-1]
            both[-1, ..., 1] = _HALF * both[-1, ..., 0]
        return both.flatten(0, 1)

    def multiply(
        self,
        rows: BFloat16[Tensor, "n d_in"],
        table: UInt8[Tensor, "outputs bytes"],
        scales: BFloat16[Tensor, "groups outputs two"],
    ) -> BFloat16[Tensor, "n d_out"]:
        """Return `rows @ W̃`.

        A few rows are multiplied with the codes, more of them with the weight, of which a part is decoded at a time.
        """
        if self.parts * len(rows) <= _MOST_ROWS:
            given = rows.contiguous() if self.parts == 1 else rows.repeat(1, self.parts)
            product = torch._weight_int4pack_mm_for_cpu(given, table, self.group_size, scales)
        else:
            product = self._multiply_decoded(rows, table, scales)
        return product[:, : self.d_out]

    def _multiply_decoded(self, rows: Tensor, table: Tensor, scales: Tensor) -> Tensor:
        dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        rows = rows.to(dtype)
        products = rows.new_empty(len(rows), self._filled)
        by_block = scales[-self._groups :, :, 0].view(self._groups, 1, -1, self.block).to(dtype)
        size = max(1, _DECODED_BYTES // (dtype.itemsize * self.d_in * self.block))
        for blocks in (slice(first, first + size) for first in range(0, by_block.shape[2], size)):
            outputs = slice(blocks.start * self.block, blocks.stop * self.block)
            codes = self._unpack(table[outputs])
            weight = rows.new_empty(self.d_in, len(codes), self.block).copy_(codes.transpose(0, 1))
            weight.view(self._groups, self.group_size, -1, self.block).mul_(by_block[:, :, blocks])
            torch.mm(rows, weight.flatten(1), out=products[:, outputs])
        return products.bfloat16()

    def _unpack(self, table: UInt8[Tensor, "outputs bytes"]) -> Int8[Tensor, "blocks d_in block"]:
        """Return the codes of some blocks; the kernel packs the first half of a block below the second one."""
        rows = table.view(-1, self.parts * self.d_in, self.block // 2)
        codes = torch.cat([rows & 15, rows >> 4], dim=2).view(torch.int8)
        if self.parts == 1:
            return codes.sub_(_HALF)
        upper, lower = codes.chunk(2, dim=1)
        return (upper - _HALF).bitwise_left_shift_(_KERNEL_BITS).add_(lower)

    @property
    def _filled(self) -> int:
        return -(-self.d_out // self.block) * self.block

    @property
    def _groups(self) -> int:
        return self.d_in // self.group_size
