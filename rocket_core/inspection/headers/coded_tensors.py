"""Schemes of weights in few bits that can be decoded, as config.json describes and headers show them. Loads no torch.

`SCHEMES` has one row per scheme. Its decoder has the same name in `rocket_core.checkpoint.decoders`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import starmap
from typing import Any

from rocket_core.errors import AlreadyQuantizedError, CorruptCheckpointError
from rocket_core.inspection.files.safetensors_headers import TensorHeader
from rocket_core.inspection.files.strict_json import is_field_name

Parts = Mapping[str, TensorHeader]
"""The tensors of a coded weight, by the endings of their names."""

# Bits of which a 32-bit word has a whole number; others are packed differently by different versions.
_PACKED_BITS = (2, 4, 8)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FP8 = ("F8_E4M3", "F8_E5M2")
# Where config.json does not say how many, as in transformers.
_FP8_BLOCK = (128, 128)
# No known model has more than a few.
_MAX_GROUPS = 64
_UNSPECIFIED = "of a kind that is not known"
# Last parts of the names of tensors that only arithmetic in few bits needs: scales of activations and of the cache.
_UNUSED = frozenset(
    """
    activation_scale activation_scale_ub input_scale input_global_scale input_scale_ub input_zero_point k_scale
    output_scale output_zero_point q_scale v_scale weight_format
    """.split()  # noqa: SIM905 - a table of names
)


class Coding(StrEnum):
    """The name of a scheme."""

    FP8 = "fp8"
    MXFP4 = "mxfp4"
    COMPRESSED = "compressed"
    COMPRESSED_PACKED = "compressed_packed"
    COMPRESSED_FP4 = "compressed_fp4"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedTensor(TensorHeader):
    """A weight in few bits, as it is once decoded; `start` and `stop` are those of its codes.

    Attributes:
        scheme: the scheme.
        parts: the tensors in the file.
        options: what config.json says about the codes.
    """

    scheme: Scheme
    parts: Parts
    options: Mapping[str, Any]

    @property
    def numbers(self) -> int:
        """Count of numbers in the decoded weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded weight."""
        return self.numbers * (4 if self.dtype == "F32" else 2)

    @property
    def file_bytes(self) -> int:
        """Bytes of all of its tensors in the files."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedFormat:
    """How a checkpoint stores weights in few bits.

    Attributes:
        title: the format in words.
        schemes: schemes of its weights.
        options: what config.json says about the codes; several where groups of layers differ.
        dtype: safetensors name of the dtype in which the model computes.
    """

    title: str
    schemes: tuple[Scheme, ...]
    options: tuple[Mapping[str, Any], ...]
    dtype: str

    @property
    def is_approximation(self) -> bool:
        """Whether such a checkpoint is usually made from one in more bits."""
        return any(scheme.is_approximation for scheme in self.schemes)

    def decoded(self, headers: Iterable[TensorHeader], model: str) -> list[TensorHeader]:
        """Return the tensors of a checkpoint with coded weights as they are once decoded, a `CodedTensor` each.

        Left out are tensors that only arithmetic in few bits needs.

        Args:
            headers: all tensors.
            model: name of the model in messages.

        Raises:
            AlreadyQuantizedError: no weight is coded, or the order in which inputs were quantized is stored, which is
                not read.
            CorruptCheckpointError: the tensors of a weight do not fit together, or not what config.json says.
        """
        by_name = {header.key: header for header in headers}
        found: list[TensorHeader] = []
        taken: set[str] = set()
        for header in by_name.values():
            possible = (self._coded(header, by_name, scheme, model) for scheme in self.schemes)
            coded = next((coded for coded in possible if coded is not None), None)
            if coded is not None:
                found.append(coded)
                taken.update(part.key for part in coded.parts.values())
        if not found:
            raise AlreadyQuantizedError(
                f"{model} stores no weight as its config.json says ({self.title}); restore the config.json that "
                "belongs to these weights, or remove quantization_config if they are plain floating-point numbers"
            )
        plain = (header for key, header in by_name.items() if key not in taken)
        return [*(header for header in plain if header.key.rpartition(".")[2] not in _UNUSED), *found]

    def _coded(self, header: TensorHeader, headers: Parts, scheme: Scheme, model: str) -> CodedTensor | None:
        parts = scheme.parts(header, headers)
        if parts is None:
            return None
        base = header.key.removesuffix(scheme.codes)
        if scheme.codes == "_packed" and f"{base}_g_idx" in headers:
            raise AlreadyQuantizedError(
                f"{model} stores an order of inputs ({base}_g_idx), with which compressed-tensors packs weights but "
                "does not read them; start from the original floating-point weights"
            )
        fits = [(shape, options) for options in self.options if (shape := scheme.shape(parts, options)) is not None]
        if len(fits) != 1:
            shapes = ", ".join(f"{part.key} {part.dtype} {part.shape}" for part in parts.values())
            raise CorruptCheckpointError(
                f"{model}: {len(fits)} of {len(self.options)} descriptions in quantization_config fit the tensors of a "
                f"weight ({shapes}); restore the config.json that belongs to these weights"
            )
        shape, options = fits[0]
        return CodedTensor(
            key=f"{base}{scheme.weight}",
            dtype=self.dtype,
            shape=shape,
            start=header.start,
            stop=header.stop,
            scheme=scheme,
            parts=parts,
            options=options,
        )


def coded_format(config: Mapping[str, Any], model: str) -> CodedFormat | None:
    """Return how a checkpoint stores weights in few bits, by its config.json; None if it does not say that.

    Args:
        config: the content of config.json.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: in a way that is not read; the message names it.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    settings: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else {}
    method = settings.get("quant_method")
    named = _shown(method)
    if method == "compressed-tensors":
        methods, options = _compressed_tensors(settings, model)
    else:
        methods, options = (str(_variant(settings)),), (settings,)
    schemes = tuple(scheme for scheme in SCHEMES if scheme.method in methods)
    if len(schemes) < len(methods):
        raise refused_format(model, named)
    title = f"{named} ({', '.join(methods)})" if method == "compressed-tensors" else named
    return CodedFormat(title=title, schemes=schemes, options=options, dtype=_compute_dtype(config))


def refused_format(model: str, named: str) -> AlreadyQuantizedError:
    """Return the error for a model whose weights are coded in a way that is not read."""
    return AlreadyQuantizedError(
        f"{model} is already compressed or quantized ({named}), in a way that Rocket does not read; start from the "
        "original floating-point weights"
    )


def _variant(settings: Mapping[str, Any]) -> object:
    """Return the method of a description other than of compressed-tensors, or None if it is a variant not read."""
    method = settings.get("quant_method")
    readable = {
        "gptq": settings.get("bits") in _PACKED_BITS,
        "awq": settings.get("bits") == 4 and settings.get("version", "gemm") == "gemm",
        "bitsandbytes": settings.get("load_in_8bit") is True and not settings.get("load_in_4bit"),
        "modelopt": settings.get("quant_algo") == "FP8",
    }
    return method if readable.get(str(method), True) else None


def _compressed_tensors(
    settings: Mapping[str, Any], model: str
) -> tuple[tuple[str, ...], tuple[Mapping[str, Any], ...]]:
    """Return the formats of a description of compressed-tensors, and the distinct descriptions of weights."""
    groups = settings.get("config_groups")
    described = list(groups.values()) if isinstance(groups, Mapping) else []
    sparsity = settings.get("sparsity_config")
    is_sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    if is_sparse or settings.get("transform_config"):
        raise refused_format(model, "compressed-tensors with sparse or transformed weights")
    if not 0 < len(described) <= _MAX_GROUPS:
        raise refused_format(model, f"compressed-tensors with {len(described)} config_groups")
    formats: dict[str, None] = {}
    options: list[Mapping[str, Any]] = []
    for group in described:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        name = group.get("format") or settings.get("format")
        formats[_shown(name)] = None
        if weights not in options:
            options.append(weights)
    unknown = [name for name in formats if name not in {scheme.method for scheme in SCHEMES}]
    if unknown or not options:
        raise refused_format(model, f"compressed-tensors, format {unknown[0] if unknown else _UNSPECIFIED}")
    return tuple(formats), tuple(options)


def _shown(name: object) -> str:
    """Return the name of a method or format as messages may repeat it."""
    return name if isinstance(name, str) and is_field_name(name.replace("-", "_")) else _UNSPECIFIED


def _compute_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            named = part.get(key)
            if isinstance(named, str) and named in _DTYPES:
                return _DTYPES[named]
    return "BF16"


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
    if len(codes) != 2 or options.get("type", "int") != "int" or bits not in _PACKED_BITS or bits is None:
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
