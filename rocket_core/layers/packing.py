"""Packing of coefficients into values and a bit mask, and of integers of 2 to 8 bits into bytes."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from rocket_core.errors import CorruptCheckpointError
from rocket_core.sizes.budget import packed_bytes

# Integers that fill a whole number of bytes.
_WORD = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCoefficients:
    """Coefficients in the form stored on disk.

    Attributes:
        values: the stored coefficients, ordered by output, then by atom.
        mask: bit `i % 8` (lowest first) of byte `i // 8` of row `j` is set if C[i, j] is stored; None if all are.
    """

    values: Float[Tensor, " nnz"]
    mask: UInt8[Tensor, "d_out bytes"] | None


def mask_shape(rank: int, d_out: int) -> tuple[int, int]:
    """Return the shape of the packed mask of coefficients."""
    return d_out, math.ceil(rank / 8)


def pack_coefficients(
    coefficients: Float[Tensor, "rank d_out"],
    support: Bool[Tensor, "rank d_out"] | None,
    *,
    always_masked: bool = False,
) -> PackedCoefficients:
    """Pack coefficients into values and mask.

    Args:
        coefficients: C, zero outside the support.
        support: mask of the coefficients to store; None stores all and equals a mask that is true everywhere.
        always_masked: create a mask even if all coefficients are stored.

    Returns:
        New tensors on the device of the coefficients; nnz is the size of the support, not the number of nonzero values.
    """
    rows = coefficients.T
    if support is None or bool(support.all()):
        if not always_masked:
            return PackedCoefficients(values=rows.reshape(-1).clone(), mask=None)
        support = torch.ones_like(coefficients, dtype=torch.bool)
    stored = support.T.contiguous()
    values = rows[stored]
    assert torch.count_nonzero(values) == torch.count_nonzero(coefficients), "a coefficient is outside the support"
    return PackedCoefficients(values=values, mask=_pack_bits(stored))


def _pack_bits(stored: Bool[Tensor, "d_out rank"]) -> UInt8[Tensor, "d_out bytes"]:
    if stored.device.type == "cpu":
        return torch.from_numpy(np.packbits(stored.numpy(), axis=1, bitorder="little"))
    bits = torch.nn.functional.pad(stored.view(torch.uint8), (0, -stored.shape[1] % 8)).view(len(stored), -1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=-1, dtype=torch.uint8)


def unpack_coefficients(
    values: Float[Tensor, " nnz"],
    mask: UInt8[Tensor, "d_out bytes"] | None,
    rank: int,
    d_out: int,
    *,
    layer: str = "this layer",
) -> Float[Tensor, "rank d_out"]:
    """Unpack coefficients; the inverse of `pack_coefficients`.

    Args:
        values: the stored coefficients.
        mask: their positions; None if all are stored.
        rank: number of atoms, >= 1; for a sparse layer, number of inputs.
        d_out: output features, >= 1.
        layer: name for messages.

    Returns:
        C, a transposed view of row-major memory. Differentiable in the values.

    Raises:
        CorruptCheckpointError: shapes disagree, the mask does not match the number of values, or its padding bits are
            not zero.
    """
    check_packed(values, mask, rank, d_out, layer)
    return scatter_rows(values, mask, rank, d_out).T


def unpack_bits(mask: UInt8[Tensor, "d_out bytes"], rank: int) -> Bool[Tensor, "d_out rank"]:
    """Return the transposed support represented by a mask."""
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        bits = np.unpackbits(mask.detach().numpy(), axis=1, count=rank, bitorder="little")  # 15 times torch's speed
        return torch.from_numpy(bits).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask.unsqueeze(-1) >> places) & 1).flatten(1)[:, :rank].bool()


def scatter_rows(
    values: Float[Tensor, " nnz"], mask: UInt8[Tensor, "d_out bytes"] | None, rank: int, d_out: int
) -> Float[Tensor, "d_out rank"]:
    """Return the transposed coefficients, from values and mask that were validated by `check_packed`."""
    if mask is None:
        return values.view(d_out, rank)
    rows = torch.zeros(d_out, rank, dtype=values.dtype, device=values.device)
    return rows.masked_scatter_(unpack_bits(mask, rank), values)


def check_packed(values: Tensor, mask: Tensor | None, rank: int, d_out: int, layer: str) -> None:
    """Raise CorruptCheckpointError, naming the layer, unless values and mask are consistent."""
    if mask is None:
        counted = rank * d_out
    else:
        if tuple(mask.shape) != mask_shape(rank, d_out):
            raise CorruptCheckpointError(
                f"{layer}: the mask is {list(mask.shape)}, not {list(mask_shape(rank, d_out))}; copy the files again"
            )
        if rank % 8 and bool((mask[:, -1] >> (rank % 8)).any()):
            raise CorruptCheckpointError(
                f"{layer}: the mask has bits beyond the {rank} coefficients of an output; copy the files again"
            )
        counted = int(torch.count_nonzero(unpack_bits(mask, rank)))
    if values.numel() != counted:
        raise CorruptCheckpointError(
            f"{layer}: {values.numel()} coefficients are stored where the layer has {counted}; copy the files again"
        )


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
