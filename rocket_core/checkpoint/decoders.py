"""Decoders of weights in few bits, one for each scheme of `rocket_core.inspection.headers.coding_schemes`.

Those of other libraries are theirs: MXFP4 of transformers; packed integers and floats of compressed-tensors.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rocket_core.errors import InvalidConfigError
from rocket_core.inspection.headers.coding_schemes import MODELOPT_FP4, Coding, fp8_block

Tensors = Mapping[str, Tensor]
"""The tensors of a weight, by the endings of their names."""

Options = Mapping[str, Any]
"""What config.json says about the codes."""

_COMPRESSED_TENSORS = (
    Coding.COMPRESSED,
    Coding.COMPRESSED_PACKED,
    Coding.COMPRESSED_FP4,
    Coding.MODELOPT_FP4,
    Coding.AWQ,
)
# Zero points of the first version of GPTQ's format are stored less one.
_SECOND_VERSION = "gptq_v2"


def check_decodable(schemes: tuple[Coding, ...]) -> None:
    """Raise an error if a package that decodes a scheme is not installed.

    Raises:
        InvalidConfigError: names the package and how to install it.
    """
    if find_spec("compressed_tensors") is None and any(name in _COMPRESSED_TENSORS for name in schemes):
        raise InvalidConfigError(
            "reading weights of this format needs compressed_tensors: pip install 'rocket-compress[vllm]'"
        )


def _fp8(tensors: Tensors, options: Options) -> Tensor:
    """Return codes times scales, which blocks of 128 x 128 share, or rows, or all, as float32."""
    codes, scale = tensors[""], next(part for ending, part in tensors.items() if ending.startswith("_scale"))
    block = fp8_block(tuple(codes.shape), tuple(scale.shape), options)
    # Bytes are exponents, as those of the dtype float8_e8m0fnu.
    scale = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if block is not None:
        rows, columns = codes.shape
        scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    elif scale.shape == codes.shape[:1]:
        scale = scale[:, None]
    return codes.float() * scale


def _mxfp4(tensors: Tensors, _options: Options) -> Tensor:
    """Return the matrix of one expert as gpt-oss stores it, `(d_in, d_out)`, in bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight: Tensor = convert_moe_packed_tensors(tensors["_blocks"][None], tensors["_scales"][None])
    return weight[0]


def _compressed(name: str) -> Callable[[Tensors, Options], Tensor]:
    def decode(tensors: Tensors, options: Options) -> Tensor:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=[], weights=QuantizationArgs.model_validate(dict(options)))
        compressor: Any = BaseCompressor.get_value_from_registry(name)
        decoded = compressor.decompress({f"weight{ending}": part for ending, part in tensors.items()}, scheme)
        weight: Tensor = decoded["weight"]
        return weight

    return decode


def _compressed_fp4(tensors: Tensors, options: Options) -> Tensor:
    name = "nvfp4-pack-quantized" if "_global_scale" in tensors else "mxfp4-pack-quantized"
    return _compressed(name)(tensors, options)


def _modelopt_fp4(tensors: Tensors, _options: Options) -> Tensor:
    """Return what compressed-tensors decodes, whose second scale divides where that of ModelOpt multiplies."""
    renamed = {
        "_packed": tensors[""],
        "_scale": tensors["_scale"],
        "_global_scale": 1 / tensors["_scale_2"].float().reshape(1),
    }
    return _compressed_fp4(renamed, MODELOPT_FP4)


def _gptq(tensors: Tensors, options: Options) -> Tensor:
    """Return `scale * (code - zero)`, where an input has the scales of its group."""
    bits, scales = options["bits"], tensors["scales"].float()
    first = 0 if options.get("checkpoint_format") == _SECOND_VERSION else 1
    codes = _unpacked(tensors["qweight"].T, bits).T
    zeros = (_unpacked(tensors["qzeros"], bits) + first) & (2**bits - 1)
    order = tensors.get("g_idx", torch.arange(len(codes)) // (len(codes) // len(scales))).long()
    weight: Tensor = (codes - zeros[order]) * scales[order]
    return weight.T


def _awq(tensors: Tensors, options: Options) -> Tensor:
    """Return `scale * (code - zero)`; the codes of a word are not in order."""
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    bits, scales = options["bits"], tensors["scales"].float()
    unpacked = AutoAWQConverter.unpack_awq(tensors["qweight"], tensors["qzeros"], bits)
    codes, zeros = (part & (2**bits - 1) for part in AutoAWQConverter.reverse_awq_order(*unpacked, bits))
    group = len(codes) // len(scales)
    weight: Tensor = (codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
    return weight.T


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers in the words of a matrix, lowest bits first, along its second axis."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    return codes.flatten(1)


def _bitsandbytes_8(tensors: Tensors, _options: Options) -> Tensor:
    """Return codes times the largest magnitude of their row, of which 127 is the code."""
    return tensors["weight"].float() * tensors["SCB"].float()[:, None] / 127


DECODERS: Mapping[Coding, Callable[[Tensors, Options], Tensor]] = {
    Coding.FP8: _fp8,
    Coding.MXFP4: _mxfp4,
    Coding.COMPRESSED: _compressed("naive-quantized"),
    Coding.COMPRESSED_PACKED: _compressed("pack-quantized"),
    Coding.COMPRESSED_FP4: _compressed_fp4,
    Coding.MODELOPT_FP4: _modelopt_fp4,
    Coding.GPTQ: _gptq,
    Coding.AWQ: _awq,
    Coding.BITSANDBYTES_8: _bitsandbytes_8,
}
"""Functions that return a weight as the model has it, given its tensors on the CPU and its options."""
