"""Tensors on disk of a rounded weight: packed or entropy-coded codes, and scales."""

from collections.abc import Mapping

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from rocket_core.errors import CorruptCheckpointError
from rocket_core.layers.code_stream import decode_codes, encode_codes
from rocket_core.layers.layer_table import LayerEntry
from rocket_core.layers.packing import pack_integers, unpack_integers, unpack_rows
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes import budget
from rocket_core.sizes.code_format import CodeFormat

_HALF = 16


def pack_codes(rounded: RoundedWeight) -> dict[str, Tensor]:
    """Return the tensors of a rounded weight by their names after `L.`: `weight` and `weight_scale`, both bytes.

    Codes are stored as code + 2^(bits - 1), output after output, or entropy coded in the same order. Scales follow in
    the same order: packed, or as the little-endian bytes of float16. They have no floating-point dtype, which loaders
    would cast.
    """
    code_format = rounded.scales.format
    codes = rounded.codes.T.reshape(-1)
    if not rounded.entropy_coded:
        weight = pack_integers(codes.view(torch.uint8) + 2 ** (code_format.bits - 1), code_format.bits)
    else:
        weight = encode_codes(codes) if rounded.stream is None else rounded.stream
    return {"weight": weight, "weight_scale": pack_scales(rounded.scales)}


def pack_scales(scales: Scales) -> UInt8[Tensor, " scale_bytes"]:
    """Return the tensor of a layer's scales; see `pack_codes`."""
    codes, bits = scales.codes.T.reshape(-1), scales.format.scale_bits
    return codes.clone().view(torch.uint8) if bits == _HALF else pack_integers(codes, bits)


def unpack_codes(
    weight: UInt8[Tensor, " bytes"],
    weight_scale: UInt8[Tensor, " scale_bytes"],
    shape: tuple[int, int],
    code_format: CodeFormat,
    exponent: int,
    *,
    entropy_coded: bool = False,
    layer: str = "this layer",
) -> RoundedWeight:
    """Return the rounded weight that `pack_codes` packed, from tensors that were validated by `check_codes`.

    Args:
        weight: packed or entropy-coded codes.
        weight_scale: packed scales.
        shape: `(d_in, d_out)` of the layer.
        code_format: bits of codes and scales, and the size of groups.
        exponent: see `Scales`.
        entropy_coded: whether codes are entropy coded.
        layer: name for messages.

    Raises:
        CorruptCheckpointError: the codes are entropy coded, and their stream is damaged.
    """
    d_in, d_out = shape
    if entropy_coded:
        codes = decode_codes(weight, d_in * d_out, layer=layer)
    else:
        codes = unpack_integers(weight, code_format.bits, d_in * d_out) - 2 ** (code_format.bits - 1)
    return RoundedWeight(
        codes=codes.view(torch.int8).view(d_out, d_in).T,
        scales=unpack_scales(weight_scale, shape, code_format, exponent),
        entropy_coded=entropy_coded,
    )


def unpack_outputs(
    weight: UInt8[Tensor, " bytes"],
    weight_scale: UInt8[Tensor, " scale_bytes"],
    outputs: Int64[Tensor, " n"],
    d_in: int,
    code_format: CodeFormat,
    exponent: int,
) -> RoundedWeight:
    """Return the rounded weight of some outputs, as `unpack_codes` does for all; nothing else is unpacked.

    Args:
        weight: packed codes of all outputs.
        weight_scale: packed scales of all outputs.
        outputs: indices of the outputs; one that does not exist is an error of `torch.index_select`.
        d_in: inputs of the layer.
        code_format: bits of codes and scales, and the size of groups.
        exponent: see `Scales`.
    """
    codes = unpack_rows(weight, code_format.bits, outputs, d_in) - 2 ** (code_format.bits - 1)
    groups = code_format.groups(d_in)
    if code_format.scale_bits == _HALF:
        scales = weight_scale.view(-1, 2 * groups).index_select(0, outputs).view(torch.float16)
    else:
        scales = unpack_rows(weight_scale, code_format.scale_bits, outputs, groups)
    return RoundedWeight(
        codes=codes.view(torch.int8).T, scales=Scales(codes=scales.T, exponent=exponent, format=code_format)
    )


def unpack_scales(
    weight_scale: UInt8[Tensor, " scale_bytes"], shape: tuple[int, int], code_format: CodeFormat, exponent: int
) -> Scales:
    """Return the scales that `pack_codes` packed; the arguments are those of `unpack_codes`."""
    d_in, d_out = shape
    groups = code_format.groups(d_in)
    if code_format.scale_bits == _HALF:
        scales = weight_scale.clone().view(torch.float16)  # a clone is aligned
    else:
        scales = unpack_integers(weight_scale, code_format.scale_bits, groups * d_out)
    return Scales(codes=scales.view(d_out, groups).T, exponent=exponent, format=code_format)


def code_shapes(
    shape: tuple[int, int], code_format: CodeFormat, coded_bytes: int | None = None
) -> dict[str, tuple[int]]:
    """Return the shapes of the tensors that `pack_codes` returns.

    Args:
        shape: `(d_in, d_out)` of the layer.
        code_format: bits of codes and scales, and the size of groups.
        coded_bytes: bytes of entropy-coded codes; None if codes are packed.
    """
    d_in, d_out = shape
    codes = budget.packed_bytes(d_in * d_out, code_format.bits) if coded_bytes is None else coded_bytes
    scales = budget.scale_bytes(d_in, d_out, code_format.group_size, code_format.scale_bits)
    return {"weight": (codes,), "weight_scale": (scales,)}


def empty_codes(
    shape: tuple[int, int], code_format: CodeFormat, device: torch.device | str | None, coded_bytes: int | None = None
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return parameters to load the tensors of `code_shapes` into, whose arguments these are."""
    weight, scales = (
        nn.Parameter(torch.empty(size, device=device, dtype=torch.uint8), requires_grad=False)
        for size in code_shapes(shape, code_format, coded_bytes).values()
    )
    return weight, scales


def check_codes(
    weight: Tensor,
    weight_scale: Tensor,
    shape: tuple[int, int],
    code_format: CodeFormat,
    layer: str,
    coded_bytes: int | None = None,
) -> None:
    """Raise CorruptCheckpointError, naming the layer, unless codes and scales belong to a layer of this shape.

    The content of entropy-coded codes is checked when they are decoded.
    """
    shapes = code_shapes(shape, code_format, coded_bytes)
    for (name, expected), tensor in zip(shapes.items(), (weight, weight_scale), strict=True):
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != expected:
            raise CorruptCheckpointError(
                f"{layer}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, not {torch.uint8} of shape "
                f"{list(expected)}; copy the files again"
            )
    d_in, d_out = shape
    scales = code_format.groups(d_in) * d_out
    unused = [] if coded_bytes is not None else [_unused(weight, code_format.bits, d_in * d_out)]
    if code_format.scale_bits == _HALF:
        halves = unpack_scales(weight_scale, shape, code_format, 0).codes
        if not bool((halves.isfinite() & (halves != 0)).all()):
            raise CorruptCheckpointError(f"{layer}: a scale is zero or not finite; copy the files again")
    else:
        unused.append(_unused(weight_scale, code_format.scale_bits, scales))
    if any(bool(integers.any()) for integers in unused):
        raise CorruptCheckpointError(f"{layer}: there are bits after the last code or scale; copy the files again")


def entry_codes(
    entry: LayerEntry, tensors: Mapping[str, Tensor], shape: tuple[int, int], *, layer: str
) -> RoundedWeight:
    """Return codes and scales of a quantized layer from its tensors.

    Args:
        entry: its entry in the table.
        tensors: its tensors by the end of their names.
        shape: `(d_in, d_out)` of the layer.
        layer: name for messages.

    Raises:
        CorruptCheckpointError: the tensors are inconsistent.
    """
    assert entry.is_quantized, layer
    assert entry.scale_exponent is not None, layer
    code_format, coded_bytes = entry.code_format, entry.coded_bytes
    expected = code_shapes(shape, code_format, coded_bytes)
    if tensors.keys() != expected.keys():
        raise CorruptCheckpointError(
            f"{layer}: it has the tensors {', '.join(sorted(tensors))}, not {', '.join(expected)}; copy the files again"
        )
    check_codes(**tensors, shape=shape, code_format=code_format, layer=layer, coded_bytes=coded_bytes)
    return unpack_codes(
        **tensors,
        shape=shape,
        code_format=code_format,
        exponent=entry.scale_exponent,
        entropy_coded=coded_bytes is not None,
        layer=layer,
    )


def _unused(packed: UInt8[Tensor, " bytes"], bits: int, n: int) -> UInt8[Tensor, " unused"]:
    """Return the integers that fill up the last 8, which must be zero."""
    return unpack_integers(packed[-bits:], bits, 8)[n % 8 or 8 :]
