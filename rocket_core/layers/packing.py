"""Packing of coefficients into values and a bit mask."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from rocket_core.errors import CorruptCheckpointError


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
    bits = np.packbits(stored.cpu().numpy(), axis=1, bitorder="little")
    return PackedCoefficients(values=values, mask=torch.from_numpy(bits).to(coefficients.device))


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
