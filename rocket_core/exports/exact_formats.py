"""Formats of other engines in which the layers of a stored artifact are exactly the same weights."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rocket_core.code_format import CodeFormat
from rocket_core.engines import ENGINES, EngineName
from rocket_core.errors import UnsupportedExportError
from rocket_core.exports import compressed_tensors
from rocket_core.exports.gguf_blocks import pack_blocks
from rocket_core.exports.stored_artifact import StoredArtifact
from rocket_core.gguf_types import BLOCK_FORMATS, BlockFormat, BlockType
from rocket_core.inspection.engine_limits import check_engine
from rocket_core.layers import LayerEntry
from rocket_core.linalg.block_codes import BlockScales, BlockWeight
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.report.formatting import bytes_text

_Found = TypeVar("_Found")

# Types with one scale for a block and nothing else, by rising bytes.
_PLAIN_TYPES: tuple[BlockType, ...] = ("Q4_0", "Q5_0", "Q8_0")
# Layers that vLLM runs as one, by the ends of their names.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_REMEDIES: Mapping[EngineName, str] = {
    "vllm": "--bits {bits} --for vllm",
    "llama.cpp": "--size {size} --for llama.cpp",
}
_BITS = 4.5


class _InexactError(Exception):
    """A layer has no equal in the format; the message completes the sentence "its weight ..."."""


def check_readable(artifact: StoredArtifact, engine: EngineName) -> None:
    """Raise an error if an engine cannot run the model, however its layers are stored.

    Raises:
        UnsupportedArchitectureError: the engine does not run models of this class, or no mixtures that Rocket writes.
        InvalidConfigError: the engine does not run models in this dtype.
    """
    named = {**artifact.settings, "architectures": [type(artifact.model).__name__]}
    check_engine(named, artifact.dtype.itemsize, ENGINES[engine], str(artifact.folder))


def code_formats(artifact: StoredArtifact) -> dict[str, CodeFormat]:
    """Return the format of each stored layer in a file of compressed-tensors.

    Raises:
        UnsupportedExportError: the format cannot hold exactly what a layer stores.
    """
    found = _for_each(artifact, "vllm", _code_format)
    for name, code_format in found.items():
        for other in _fused_with(name):
            if other not in artifact.modules and f"{other}.weight" not in artifact.checkpoint.entries:
                continue
            if found.get(other) != code_format:
                raise _refusal(artifact, "vllm", f"{name!r} and {other!r} are stored differently, and vLLM fuses them")
    return found


def compressed_tensors_config(artifact: StoredArtifact, formats: Mapping[str, CodeFormat]) -> dict[str, Any] | None:
    """Return the `quantization_config` of a file of compressed-tensors; None if all layers are dense."""
    by_module = {artifact.modules[name][0]: (one, artifact.shape(name)[0]) for name, one in formats.items()}
    linear = (name for name, part in artifact.model.named_modules() if isinstance(part, nn.Linear))
    dense = [name for name in linear if name not in by_module]
    return compressed_tensors.quantization_config(by_module, dense) if by_module else None


def block_types(artifact: StoredArtifact) -> dict[str, BlockType]:
    """Return the block type of each stored layer in a GGUF file; the codes of every layer are read for that.

    Raises:
        UnsupportedExportError: no block type can hold exactly what a layer stores.
    """
    return _for_each(artifact, "llama.cpp", _block_type)


def blocks(artifact: StoredArtifact, name: str, block_type: BlockType) -> UInt8[Tensor, "d_out row_bytes"]:
    """Return the rows of a stored layer under the block type that `block_types` found."""
    rounded, block_format = artifact.codes(name), BLOCK_FORMATS[block_type]
    scales = _block_scales(rounded, block_format).half()
    return pack_blocks(
        BlockWeight(
            codes=rounded.codes,
            scales=BlockScales(
                block_scales=scales,
                group_scales=torch.ones(scales.shape, dtype=torch.int8),
                block_minima=None,
                group_minima=None,
                format=block_format,
            ),
        )
    )


def _for_each(
    artifact: StoredArtifact, engine: EngineName, judge: Callable[[StoredArtifact, str], _Found]
) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    reasons: dict[str, str] = {}
    for name in artifact.entries:
        try:
            found[name] = judge(artifact, name)
        except _InexactError as error:
            reasons[name] = str(error)
    if reasons:
        name, reason = next(iter(reasons.items()))
        count = f"{len(reasons)} of {len(artifact.entries)} stored layers have no equal in it, first {name!r}, whose"
        raise _refusal(artifact, engine, f"{count} weight {reason}")
    return found


def _refusal(artifact: StoredArtifact, engine: EngineName, reason: str) -> UnsupportedExportError:
    reader = ENGINES[engine]
    options = _REMEDIES[engine].format(bits=_BITS, size=bytes_text(artifact.checkpoint.stored_bytes).replace(" ", ""))
    return UnsupportedExportError(
        f"{artifact.folder} cannot be written exactly as {reader.exports[0]}: {reason}; compress the original for "
        f"{reader.title} instead: rocket compress ORIGINAL OUT {options}"
    )


def _quantized(artifact: StoredArtifact, name: str) -> LayerEntry:
    entry = artifact.entries[name]
    if not entry.is_quantized:
        raise _InexactError("is made of coefficients" if entry.is_sparse else "is a product of two factors")
    return entry


def _code_format(artifact: StoredArtifact, name: str) -> CodeFormat:
    entry, engine = _quantized(artifact, name), ENGINES["vllm"]
    if isinstance(artifact.modules[name][1], nn.Embedding):
        raise _InexactError("is that of a quantized embedding")
    if entry.coded_bytes is not None:
        raise _InexactError("is entropy coded")
    code_format, (d_in, _) = entry.code_format, artifact.shape(name)
    if code_format.bits not in engine.codes.bits:
        raise _InexactError(f"has codes of {code_format.bits} bits")
    size = 0 if code_format.group_size >= d_in else code_format.group_size
    if size not in (engine.codes.group_sizes or ()) or d_in % code_format.group_size or d_in * code_format.bits % 32:
        raise _InexactError(f"has scales for groups of {code_format.group_size} of its {d_in} inputs")
    scales = artifact.codes(name).scales.values(torch.float32)
    if not torch.equal(scales.to(artifact.dtype).float(), scales):
        raise _InexactError(f"has scales that {str(artifact.dtype).removeprefix('torch.')} does not represent")
    return code_format


def _fused_with(name: str) -> list[str]:
    stem, _, last = name.rpartition(".")
    return [f"{stem}.{other}" for parts in _FUSED if last in parts for other in parts if other != last]


def _block_type(artifact: StoredArtifact, name: str) -> BlockType:
    _quantized(artifact, name)
    rounded = artifact.codes(name)
    least, largest = int(rounded.codes.min()), int(rounded.codes.max())
    formats = (BLOCK_FORMATS[name] for name in _PLAIN_TYPES)
    block_format = next((one for one in formats if one.levels[0] <= least and largest <= one.levels[-1]), None)
    if block_format is None:
        raise _InexactError(f"has codes from {least} to {largest}")
    (d_in, _), size = rounded.shape, rounded.scales.format.group_size
    if not block_format.fits(d_in) or (size < d_in and size % block_format.block_size):
        raise _InexactError(f"has scales for groups of {size} of its {d_in} inputs")
    scales = _block_scales(rounded, block_format)
    if not torch.equal(scales.half().float(), scales):
        raise _InexactError("has scales that float16 does not represent")
    return block_format.name


def _block_scales(rounded: RoundedWeight, block_format: BlockFormat) -> Tensor:
    """Return the scale of each block of each output, in float32, for groups of whole blocks."""
    (d_in, _), size = rounded.shape, rounded.scales.format.group_size
    times = min(size, d_in) // block_format.block_size
    return rounded.scales.values(torch.float32).repeat_interleave(times, dim=0)[: d_in // block_format.block_size]
