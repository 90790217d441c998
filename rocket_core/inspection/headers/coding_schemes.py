"""Schemes of weights in few bits that can be decoded: the tensors of a weight, and its shape. Loads no torch.

`SCHEMES` has one row per scheme. Its decoder has the same name in `rocket_core.checkpoint.decoders`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import starmap
from typing import Any

from rocket_core.inspection.files.safetensors_headers import TensorHeader

Parts = Mapping[str, TensorHeader]
"""The tensors of a coded weight, by the endings of their names."""

PACKED_BITS = (2, 4, 8)
"""Bits of which a 32-bit word has a whole number; others are packed differently by different versions."""

MODELOPT_FP4: Mapping[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
"""NVFP4 of ModelOpt, in the words of compressed-tensors."""

_FP8 = ("F8_E4M3", "F8_E5M2")
# Where config.json does not say how many, as in transformers.
_FP8_BLOCK = (128, 128)


class Coding(StrEnum):
    """The name of a scheme."""

    FP8 = "fp8"
    MXFP4 = "mxfp4"
    COMPRESSED = "compressed"
    COMPRESSED_PACKED = "compressed_packed"
    COMPRESSED_FP4 = "compressed_fp4"
    MODELOPT_FP4 = "modelopt_fp4"
    GPTQ = "gptq"
    AWQ = "awq"
    BITSANDBYTES_8 = "bitsandbytes_8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A way to code weights.

    Attributes:
        name: names its decoder.
        method: `quant_method` in config.json, or for compressed-tensors the format.
        codes: ending of the name of the tensor of codes.
        dtypes: dtypes that it may have.
        weight: the same ending of the decoded weight's name.
        needed: endings of the other tensors.
        optional: endings of tensors that only some weights have.
        shape: returns the shape of the weight, given the parts and the options; None if they do not fit together.
        is_approximation: whether such a checkpoint is usually made from one in more bits.
    """

    name: Coding
    method: str
    codes: str
    dtypes: Sequence[str]
    needed: Sequence[str]
    shape: Callable[[Parts, Mapping[str, Any]], tuple[int, ...] | None]
    weight: str = ""
    optional: Sequence[str] = ()
    is_approximation: bool = False

    def parts(self, header: TensorHeader, headers: Parts) -> Parts | None:
        """Return the tensors of a weight, given that of its codes; None if it has others."""
        if header.dtype not in self.dtypes or not header.key.endswith(self.codes):
            return None
        base = header.key.removesuffix(self.codes)
        found = {ending: headers[f"{base}{ending}"] for ending in self.endings if f"{base}{ending}" in headers}
        return found if {self.codes, *self.needed} <= found.keys() else None

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of the names of all tensors."""
        return self.codes, *self.needed, *self.optional


def _integer(options: Mapping[str, Any], key: str) -> int | None:
    value = options.get(key)
    return value if type(value) is int and value > 0 else None


def _pair(value: object) -> tuple[int, int] | None:
    fits = isinstance(value, list | tuple) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
    return (value[0], value[1]) if fits and isinstance(value, list | tuple) else None


def fp8_block(codes: tuple[int, ...], scale: tuple[int, ...], options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in FP8, of which the last ones may be fewer; None without blocks.

    Args:
        codes: shape of the codes, `(..., d_out, d_in)`.
        scale: shape of the scales.
        options: what config.json says.
    """
    block = _pair(options.get("weight_block_size", _FP8_BLOCK))
    if block is None:
        return None
    blocks = tuple(-(-side // length) for side, length in zip(codes[-2:], block, strict=True))
    return block if scale == (*codes[:-2], *blocks) else None


def _shape_of_fp8(parts: Parts, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes, scale = parts[""].shape, next(part.shape for ending, part in parts.items() if ending.startswith("_scale"))
    if len(codes) < 2:
        return None
    is_even = len(scale) == len(codes) and all(one in (1, other) for one, other in zip(scale, codes, strict=True))
    fits = math.prod(scale) == 1 or scale == codes[:1] or is_even or fp8_block(codes, scale, options) is not None
    return codes if fits else None


def _shape_of_mxfp4(parts: Parts, _options: Mapping[str, Any]) -> tuple[int, ...] | None:
    blocks = parts["_blocks"].shape
    if len(blocks) != 4 or parts["_scales"].shape != blocks[:-1]:
        return None
    experts, rows, groups, size = blocks
    return experts, groups * size * 2, rows


def _shape_of_packed(parts: Parts, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes, bits = parts["_packed"].shape, _integer(options, "num_bits")
    if len(codes) != 2 or options.get("type", "int") != "int" or bits not in PACKED_BITS or bits is None:
        return None
    shape = codes[0], codes[1] * 32 // bits
    return shape if _is_scaled(shape, parts, options) else None


def _shape_of_numbers(parts: Parts, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes, kind = parts[""], "int" if parts[""].dtype == "I8" else "float"
    if options.get("num_bits", 8) != 8 or options.get("type", "int") != kind:
        return None
    return codes.shape if len(codes.shape) == 2 and _is_scaled(codes.shape, parts, options) else None


def _shape_of_fp4(parts: Parts, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes = parts["_packed"].shape
    if len(codes) != 2 or options.get("num_bits") != 4 or options.get("type") != "float":
        return None
    shape = codes[0], 2 * codes[1]
    return shape if _is_scaled(shape, parts, options) else None


def _shape_of_modelopt_fp4(parts: Parts, _options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes, scale = parts[""].shape, parts["_scale"].shape
    fits = len(codes) == 2 and scale == (codes[0], 2 * codes[1] // MODELOPT_FP4["group_size"])
    return (codes[0], 2 * codes[1]) if fits and math.prod(parts["_scale_2"].shape) == 1 else None


def _is_scaled(shape: tuple[int, ...], parts: Parts, options: Mapping[str, Any]) -> bool:
    """Return whether scales of compressed-tensors are as many as a description says."""
    scale, (rows, columns) = parts["_scale"].shape, shape
    if bool(options.get("symmetric", True)) == ("_zero_point" in parts):
        return False
    group, block = _integer(options, "group_size"), _pair(options.get("block_structure"))
    if block is not None:
        return scale == tuple(-(-side // length) for side, length in zip(shape, block, strict=True))
    if group is not None:
        return columns % group == 0 and scale == (rows, columns // group)
    return scale in ((rows, 1), (rows,), (1,), ())


def _shape_of_gptq(parts: Parts, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes, scales, bits = parts["qweight"].shape, parts["scales"].shape, options["bits"]
    if len(codes) != 2 or len(scales) != 2 or not scales[0]:
        return None
    d_in, d_out = codes[0] * 32 // bits, codes[1]
    order = parts["g_idx"].shape if "g_idx" in parts else (d_in,)
    fits = scales[1] == d_out and d_in % scales[0] == 0 and order == (d_in,)
    return (d_out, d_in) if fits and parts["qzeros"].shape == (scales[0], d_out * bits // 32) else None


def _shape_of_awq(parts: Parts, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes, scales = parts["qweight"].shape, parts["scales"].shape
    if len(codes) != 2 or len(scales) != 2 or not scales[0]:
        return None
    d_in, d_out = codes[0], codes[1] * 32 // options["bits"]
    fits = scales[1] == d_out and d_in % scales[0] == 0 and parts["qzeros"].shape == (scales[0], codes[1])
    return (d_out, d_in) if fits else None


def _shape_of_int8(parts: Parts, _options: Mapping[str, Any]) -> tuple[int, ...] | None:
    codes = parts["weight"].shape
    return codes if len(codes) == 2 and parts["SCB"].shape == codes[:1] else None


def _fp8(method: str, scale: str) -> Scheme:
    return Scheme(name=Coding.FP8, method=method, codes="", dtypes=_FP8, needed=(scale,), shape=_shape_of_fp8)


def _numbers(method: str) -> Scheme:
    return Scheme(
        name=Coding.COMPRESSED,
        method=method,
        codes="",
        dtypes=("I8", "F8_E4M3"),
        needed=("_scale",),
        optional=("_zero_point",),
        shape=_shape_of_numbers,
    )


def _fp4(method: str, *needed: str) -> Scheme:
    return Scheme(
        name=Coding.COMPRESSED_FP4,
        method=method,
        codes="_packed",
        dtypes=("U8",),
        needed=("_scale", *needed),
        shape=_shape_of_fp4,
    )


SCHEMES: tuple[Scheme, ...] = (
    _fp8("fp8", "_scale_inv"),
    *starmap(_fp8, (("fbgemm_fp8", "_scale"), ("modelopt", "_scale"))),
    Scheme(
        name=Coding.MXFP4, method="mxfp4", codes="_blocks", dtypes=("U8",), needed=("_scales",), shape=_shape_of_mxfp4
    ),
    *map(_numbers, ("float-quantized", "int-quantized", "naive-quantized")),
    Scheme(
        name=Coding.COMPRESSED_PACKED,
        method="pack-quantized",
        codes="_packed",
        dtypes=("I32",),
        needed=("_scale", "_shape"),
        optional=("_zero_point",),
        shape=_shape_of_packed,
    ),
    _fp4("nvfp4-pack-quantized", "_global_scale"),
    _fp4("mxfp4-pack-quantized"),
    Scheme(
        name=Coding.MODELOPT_FP4,
        method="modelopt",
        codes="",
        dtypes=("U8",),
        needed=("_scale", "_scale_2"),
        shape=_shape_of_modelopt_fp4,
    ),
    Scheme(
        name=Coding.GPTQ,
        method="gptq",
        codes="qweight",
        dtypes=("I32",),
        needed=("qzeros", "scales"),
        optional=("g_idx",),
        weight="weight",
        shape=_shape_of_gptq,
        is_approximation=True,
    ),
    Scheme(
        name=Coding.AWQ,
        method="awq",
        codes="qweight",
        dtypes=("I32",),
        needed=("qzeros", "scales"),
        weight="weight",
        shape=_shape_of_awq,
        is_approximation=True,
    ),
    Scheme(
        name=Coding.BITSANDBYTES_8,
        method="bitsandbytes",
        codes="weight",
        dtypes=("I8",),
        needed=("SCB",),
        weight="weight",
        shape=_shape_of_int8,
        is_approximation=True,
    ),
)
