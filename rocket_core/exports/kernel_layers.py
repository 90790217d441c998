"""The tensors of an artifact as an engine with kernels for codes of few widths loads them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rocket_core.checkpoint import TensorPlan
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.engines import ENGINES
from rocket_core.exports.compressed_tensors import plan_layer
from rocket_core.exports.conversion import plan_dense
from rocket_core.exports.exact_layers import FUSED
from rocket_core.exports.stored_artifact import StoredArtifact
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes.code_format import CodeFormat, formats_for


def kernel_formats(artifact: StoredArtifact, widest: int) -> dict[str, CodeFormat]:
    """Return the format in which vLLM's kernels take each layer of codes that they can take; all others become dense.

    Codes become as wide as the next kernel's, and groups as small as the next one's, which changes no weight; scales
    are rounded to what 16 bits represent. Layers that vLLM runs as one have one format. Layers of experts, embeddings
    and heads become dense.

    Args:
        artifact: the artifact.
        widest: bits of the widest codes that there is a kernel for.
    """
    head = artifact.model.get_output_embeddings()
    found: dict[str, CodeFormat] = {}
    for name, entry in artifact.entries.items():
        module = artifact.modules[name][1]
        if entry.is_quantized and isinstance(module, nn.Linear) and module is not head and ".experts." not in name:
            code_format = _kernel_format(entry.code_format, artifact.shape(name)[0], widest)
            if code_format is not None:
                found[name] = code_format
    for parts in {_fused_with(artifact, name) for name in found}:
        common = _common([found.get(name) for name in parts])
        for name in parts:
            if common is None:
                found.pop(name, None)
            else:
                found[name] = common
    return found


def kernel_tensors(artifact: StoredArtifact, formats: Mapping[str, CodeFormat]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, one in memory at a time: codes as compressed-tensors packs them, all other layers dense.

    Args:
        artifact: the artifact.
        formats: from `kernel_formats`.
    """

    def plan(name: str) -> Iterator[TensorPlan]:
        read = functools.partial(_in_format, artifact, name, formats[name])
        return plan_layer(f"{name}.", artifact.shape(name), formats[name], artifact.dtype, read)

    for planned in plan_dense(artifact, {name: functools.partial(plan, name) for name in formats}):
        stored = bytearray(b"".join(planned.chunks()))
        yield planned.key, torch.frombuffer(stored, dtype=DTYPES[planned.dtype]).view(planned.shape)


def _kernel_format(code_format: CodeFormat, d_in: int, widest: int) -> CodeFormat | None:
    taken = [
        one
        for one in formats_for(d_in, ENGINES["vllm"].codes)
        if code_format.bits <= one.bits <= widest and min(code_format.group_size, d_in) % one.group_size == 0
    ]
    return min(taken, key=lambda one: (one.bits, -one.group_size), default=None)


def _fused_with(artifact: StoredArtifact, name: str) -> tuple[str, ...]:
    """Return the layers of the model that vLLM runs as one with a layer, itself included."""
    stem, _, last = name.rpartition(".")
    parts = next((parts for parts in FUSED if last in parts), (last,))
    names = [f"{stem}.{part}" for part in parts]
    return tuple(one for one in names if one in artifact.entries or f"{one}.weight" in artifact.checkpoint.entries)


def _common(formats: Sequence[CodeFormat | None]) -> CodeFormat | None:
    """Return the format that holds all of these without a change; None if one of them is dense, or there is no such."""
    known = [one for one in formats if one is not None]
    size = min(one.group_size for one in known)
    if len(known) < len(formats) or any(one.group_size % size for one in known):
        return None
    return replace(known[0], bits=max(one.bits for one in known), group_size=size)


def _in_format(artifact: StoredArtifact, name: str, code_format: CodeFormat) -> RoundedWeight:
    """Return codes and scales of a layer in a format that `kernel_formats` found."""
    rounded = artifact.codes(name)
    d_in = artifact.shape(name)[0]
    times = min(rounded.scales.format.group_size, d_in) // code_format.group_size
    # The last group of an output may have fewer inputs.
    values = rounded.scales.values(torch.float32).repeat_interleave(times, dim=0)[: code_format.groups(d_in)]
    return RoundedWeight(codes=rounded.codes, scales=Scales.nearest(values, 0, code_format))
