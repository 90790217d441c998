"""Formats of other engines in which the layers of a stored artifact are exactly the same weights."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from rocket_core.engines import ENGINES, EngineName
from rocket_core.errors import UnsupportedExportError
from rocket_core.exports import compressed_tensors
from rocket_core.exports.exact_layers import (
    PLAIN_TYPES,
    StoredForm,
    no_equals,
    stored_differently,
    unlike_neighbour,
    why_not_blocks,
    why_not_packed,
)
from rocket_core.exports.gguf_blocks import pack_blocks
from rocket_core.exports.stored_artifact import StoredArtifact
from rocket_core.hf.names import disk_names
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.linalg.block_codes import BlockScales, BlockWeight
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.report.formatting import bytes_text
from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockFormat, BlockType
from rocket_core.sizes.code_format import CodeFormat

_Found = TypeVar("_Found")

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
    unlike = unlike_neighbour(
        found, lambda name: name in artifact.modules or f"{name}.weight" in artifact.checkpoint.entries
    )
    if unlike is not None:
        raise _refusal(artifact, "vllm", stored_differently(*unlike))
    return found


def compressed_tensors_config(artifact: StoredArtifact, formats: Mapping[str, CodeFormat]) -> dict[str, Any] | None:
    """Return the `quantization_config` of a file of compressed-tensors; None if all layers are dense."""
    by_module = {artifact.modules[name][0]: (one, artifact.shape(name)[0]) for name, one in formats.items()}

    def disk_name(router: str) -> str:
        return disk_names(artifact.model, [router])[router]

    return compressed_tensors.model_config(artifact.model, by_module, disk_name)


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
        raise _refusal(artifact, engine, no_equals(reasons, len(artifact.entries)))
    return found


def _refusal(artifact: StoredArtifact, engine: EngineName, reason: str) -> UnsupportedExportError:
    reader = ENGINES[engine]
    options = _REMEDIES[engine].format(bits=_BITS, size=bytes_text(artifact.checkpoint.stored_bytes).replace(" ", ""))
    return UnsupportedExportError(
        f"{artifact.folder} cannot be written exactly as {reader.exports[0]}: {reason}; compress the original for "
        f"{reader.title} instead: rocket compress ORIGINAL OUT {options}"
    )


def _form(artifact: StoredArtifact, name: str) -> StoredForm:
    entry = artifact.entries[name]
    return StoredForm(
        d_in=artifact.shape(name)[0],
        is_codes=entry.is_quantized,
        is_sparse=entry.is_sparse,
        is_entropy_coded=entry.coded_bytes is not None,
        is_table=isinstance(artifact.modules[name][1], nn.Embedding),
        bits=entry.bits,
        group_size=entry.group_size,
    )


def _code_format(artifact: StoredArtifact, name: str) -> CodeFormat:
    reason = why_not_packed(_form(artifact, name))
    if reason is not None:
        raise _InexactError(reason)
    scales = artifact.codes(name).scales.values(torch.float32)
    if not torch.equal(scales.to(artifact.dtype).float(), scales):
        raise _InexactError(f"has scales that {str(artifact.dtype).removeprefix('torch.')} does not represent")
    return artifact.entries[name].code_format


def _block_type(artifact: StoredArtifact, name: str) -> BlockType:
    reason = why_not_blocks(_form(artifact, name))
    if reason is not None:
        raise _InexactError(reason)
    rounded = artifact.codes(name)
    least, largest = int(rounded.codes.min()), int(rounded.codes.max())
    formats = (BLOCK_FORMATS[name] for name in PLAIN_TYPES)
    block_format = next((one for one in formats if one.levels[0] <= least and largest <= one.levels[-1]), None)
    if block_format is None:
        raise _InexactError(f"has codes from {least} to {largest}")
    scales = _block_scales(rounded, block_format)
    if not torch.equal(scales.half().float(), scales):
        raise _InexactError("has scales that float16 does not represent")
    return block_format.name


def _block_scales(rounded: RoundedWeight, block_format: BlockFormat) -> Tensor:
    """Return the scale of each block of each output, in float32, for groups of whole blocks."""
    (d_in, _), size = rounded.shape, rounded.scales.format.group_size
    times = min(size, d_in) // block_format.block_size
    return rounded.scales.values(torch.float32).repeat_interleave(times, dim=0)[: d_in // block_format.block_size]
