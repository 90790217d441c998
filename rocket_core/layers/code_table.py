"""Tables of integer codes that torch's embedding kernels multiply with, on a CPU and in float32.

Those kernels add up rows of a table of integers, each times a number: `out = Σ_i x_i · row_i`. With a row for every
input and a bag of rows for every group, one call gives the sums of all groups, which are then multiplied with their
scales. So a layer is computed from its codes, in whatever groups, with the rounding of float32 alone.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from jaxtyping import Float, Float32, Int8, UInt8
from torch import Tensor

from rocket_core.linalg.integer_codes import Scales
from rocket_core.sizes.code_format import CodeFormat

_BYTE = 8
# Outputs in a row: a few hundred bytes of a table's rows stay in the registers and the first cache.
_ROW_OUTPUTS = 128
# Outputs are filled up to a multiple of this, so that every row has whole bytes and vectors.
_FILL = 16
# Rows of a bag where all inputs share a scale: a few kilobytes, which the kernel reads several times.
_BAG = 64
# With more rows of input it is faster to multiply with the decoded weight. Measured on one core with AVX2.
_MOST_ROWS = 12
# Bytes of the part of the weight that is decoded at a time.
_DECODED_BYTES = 2**23
# Multiplying with fewer codes takes less time than waking up threads.
_CODES_PER_THREAD = 2**19


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The arrangement of a layer's codes in a table of bytes.

    The outputs are divided into tiles of equal size, the last one filled up with zeros. A tile has a row for every
    input: the codes of its outputs plus half of their range, lowest bits first; then the kernel's scale, 1, and its
    offset, minus that half.

    Attributes:
        d_in: inputs.
        d_out: outputs.
        bits: bits of a code in the table: 2, 4 or 8.
        group_size: inputs that share a scale, at most d_in.
        tiles: number of tiles.
        outputs: outputs of a tile.
    """

    d_in: int
    d_out: int
    bits: int
    group_size: int
    tiles: int
    outputs: int

    @classmethod
    def of(cls, shape: tuple[int, int], code_format: CodeFormat) -> "TableLayout":
        """Return the layout for a layer; codes of 3 bits are stored in 4, codes of 5 to 7 in 8."""
        d_in, d_out = shape
        bits = next(bits for bits in (2, 4, 8) if bits >= code_format.bits)
        tiles = -(-d_out // _ROW_OUTPUTS)
        outputs = -(-d_out // (tiles * _FILL)) * _FILL
        return cls(d_in, d_out, bits, min(code_format.group_size, d_in), tiles, outputs)

    @property
    def numbers(self) -> list[int]:
        """The attributes, in order."""
        return [self.d_in, self.d_out, self.bits, self.group_size, self.tiles, self.outputs]

    @property
    def groups(self) -> int:
        """Groups of an output."""
        return -(-self.d_in // self.group_size)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a table and of the scales of its tiles."""
        rows = self.tiles * self.d_in * (self._code_bytes + len(self._ending()))
        return rows + self.tiles * self.groups * self.outputs * torch.float32.itemsize

    @property
    def _code_bytes(self) -> int:
        return self.outputs * self.bits // _BYTE

    @property
    def _half(self) -> int:
        return 1 << (self.bits - 1)

    def fill(self, codes: Int8[Tensor, "d_in d_out"]) -> UInt8[Tensor, "rows row_bytes"]:
        """Return the table of codes, in new memory."""
        filled = torch.full((self.d_in, self.tiles * self.outputs), self._half, dtype=torch.uint8, device=codes.device)
        filled[:, : self.d_out] = codes.view(torch.uint8) + self._half
        parts = filled.view(self.d_in, self.tiles, self._code_bytes, -1).transpose(0, 1)
        packed = parts[..., 0].clone(memory_format=torch.contiguous_format)
        for part in range(1, _BYTE // self.bits):
            packed |= parts[..., part] << (part * self.bits)
        ends = self._ending().to(codes.device).expand(self.tiles, self.d_in, -1)
        return torch.cat([packed, ends], dim=2).flatten(0, 1)

    def codes(self, table: UInt8[Tensor, "rows row_bytes"]) -> Int8[Tensor, "d_in d_out"]:
        """Return the codes in a table; the inverse of `fill`."""
        unsigned = torch.empty(self.tiles, self.d_in, self.outputs, dtype=torch.uint8, device=table.device)
        self._unpack(table, unsigned)
        codes = (unsigned - self._half).view(torch.int8).transpose(0, 1).flatten(1)
        return codes[:, : self.d_out].contiguous()

    def scales(self, scales: Scales) -> Float32[Tensor, "tiles groups outputs"]:
        """Return the scales of every tile; those that fill up are zero."""
        values = scales.values(torch.float32)
        filled = values.new_zeros(self.groups, self.tiles * self.outputs)
        filled[:, : self.d_out] = values
        return filled.view(self.groups, self.tiles, self.outputs).transpose(0, 1).contiguous()

    def multiply(
        self,
        rows: Float[Tensor, "n d_in"],
        table: UInt8[Tensor, "rows row_bytes"],
        scales: Float32[Tensor, "tiles groups outputs"],
    ) -> Float32[Tensor, "n d_out"]:
        """Return `rows @ W̃`, computed in float32.

        A few rows are multiplied one by one with the codes, more of them with the weight, of which a part is decoded at
        a time.
        """
        rows = rows.float()
        if len(rows) > _MOST_ROWS:
            return self._multiply_decoded(rows, table, scales)
        products = [self._multiply_row(row, table, scales) for row in rows]
        return torch.stack(products) if products else rows.new_zeros(0, self.d_out)

    def _multiply_row(self, row: Tensor, table: Tensor, scales: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        # The kernel of bytes uses threads itself.
        parts = 1 if self.bits == _BYTE else min(threads, self.tiles, table.numel() // _CODES_PER_THREAD)
        if parts <= 1:
            return self._multiply_tiles(row, table, scales).flatten()[: self.d_out]
        size = -(-self.tiles // parts)
        tiles = [slice(first, first + size) for first in range(0, self.tiles, size)]
        inference = torch.is_inference_mode_enabled()

        def multiply(part: slice) -> Tensor:
            with torch.inference_mode(inference), torch.no_grad():
                return self._multiply_tiles(row, table[part.start * self.d_in : part.stop * self.d_in], scales[part])

        return torch.cat(list(_pool(os.getpid(), threads).map(multiply, tiles))).flatten()[: self.d_out]

    def _multiply_tiles(self, row: Tensor, table: Tensor, scales: Tensor) -> Float32[Tensor, "tiles outputs"]:
        tiles = len(scales)
        one_group = self.groups == 1
        indices, bags = _bags(tiles, self.d_in, _BAG if one_group else self.group_size)
        sums = _add_rows(self.bits, table, indices, bags, row.repeat(tiles)).view(tiles, -1, self.outputs)
        return sums.sum(dim=1) * scales[:, 0] if one_group else sums.mul_(scales).sum(dim=1)

    def _multiply_decoded(self, rows: Tensor, table: Tensor, scales: Tensor) -> Tensor:
        products = rows.new_empty(len(rows), self.tiles, self.outputs)
        size = max(1, _DECODED_BYTES // (4 * self.d_in * self.outputs))
        for tiles in (slice(first, first + size) for first in range(0, self.tiles, size)):
            weight = scales.new_empty(len(scales[tiles]), self.d_in, self.outputs)
            self._unpack(table[tiles.start * self.d_in : tiles.stop * self.d_in], weight)
            weight.sub_(self._half)
            whole = self.d_in // self.group_size * self.group_size
            by_group = weight[:, :whole].view(len(weight), -1, self.group_size, self.outputs)
            by_group.mul_(scales[tiles, : by_group.shape[1], None])
            weight[:, whole:].mul_(scales[tiles, by_group.shape[1] :])
            products[:, tiles] = torch.matmul(rows, weight).transpose(0, 1)
        return products.flatten(1)[:, : self.d_out]

    def _ending(self) -> UInt8[Tensor, " bytes"]:
        """Return the bytes of the kernel's scale and offset."""
        dtype = torch.float32 if self.bits == _BYTE else torch.float16
        return torch.tensor([1.0, -self._half], dtype=dtype, device="cpu").view(torch.uint8)

    def _unpack(self, table: Tensor, unsigned: Tensor) -> None:
        """Write the integers of a table's rows into a tensor of any dtype."""
        packed = table[:, : self._code_bytes].view(*unsigned.shape[:2], -1)
        parts = unsigned.view(*unsigned.shape[:2], self._code_bytes, -1)
        for part in range(parts.shape[-1]):
            parts[..., part] = (packed >> (part * self.bits)) & (2 * self._half - 1)


def _add_rows(bits: int, table: Tensor, indices: Tensor, bags: Tensor, numbers: Tensor) -> Tensor:
    """Return, for each bag, the sum of its rows, each times its number."""
    arguments = (table, indices, bags, False, 0, False, numbers, None, True)
    kernels = torch.ops.quantized
    if bits == _BYTE:
        return kernels.embedding_bag_byte_rowwise_offsets(*arguments)  # type: ignore[no-any-return]
    if 2 * bits == _BYTE:
        return kernels.embedding_bag_4bit_rowwise_offsets(*arguments)  # type: ignore[no-any-return]
    return kernels.embedding_bag_2bit_rowwise_offsets(*arguments)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _bags(tiles: int, d_in: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of all rows of some tiles, and where each bag of this size starts among them."""
    with torch.inference_mode(False):
        rows = torch.arange(tiles * d_in, dtype=torch.int32)
        starts = rows.view(tiles, d_in)[:, ::size].flatten()
        return rows, torch.cat([starts, torch.tensor([tiles * d_in], dtype=torch.int32)])


@cache
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads of this process, as those of its parent do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rocket-codes")
