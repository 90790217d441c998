"""Bytes of the headers of a checkpoint that is yet to be written. Loads no torch."""

import json
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from rocket_core.candidates import CODED_FACTOR_NAMES, FACTOR_NAMES, PACKED_NAMES
from rocket_core.engines import EngineName

METADATA = MappingProxyType({"format": "pt"})
"""Metadata of each file, constant: with a time or a run in it, identical models would differ."""
ALIGNMENT = 8
"""Alignment of a header, and the size of the length field before it, in bytes."""
# Characters in the names of dtypes that are written, at most.
_LONGEST_DTYPE = 4
_PARTS: dict[EngineName, tuple[str, ...]] = {
    "vllm": PACKED_NAMES,
    "vllm-int8": ("weight", "weight_scale"),
    "vllm-fp8": ("weight", "weight_scale"),
    "vllm-nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mlx": ("weight", "scales", "biases"),
    "onnx": ("qweight", "scales"),
}


def header_bytes(tensors: Iterable[tuple[str, Sequence[int]]], stored: int, max_shard_bytes: int) -> int:
    """Return an upper bound on the bytes of a checkpoint's headers: everything in its files except the tensors.

    Args:
        tensors: name and shape of each tensor.
        stored: upper bound on the bytes of all tensors.
        max_shard_bytes: size at which a new file is started.
    """
    empty = {"dtype": " " * _LONGEST_DTYPE, "shape": [], "data_offsets": [stored, stored]}
    around = len(json.dumps({"": empty})) - len('""')
    entries = sum(around + len(json.dumps(key)) + len(", ".join(map(str, shape))) for key, shape in tensors)
    # Any two consecutive files are together larger than the maximum of one.
    files = 2 * stored // max_shard_bytes + 1
    return entries + files * (len(json.dumps({"__metadata__": dict(METADATA)})) + 2 * ALIGNMENT)


def stored_parts(engine: EngineName, *, codes_factors: bool) -> tuple[str, ...]:
    """Return the names of the most tensors that may replace the weight of a layer.

    Args:
        engine: name of the engine that reads the files.
        codes_factors: whether factors may be codes. These have no mask, so that four of the five names do.
    """
    if engine in _PARTS:
        return _PARTS[engine]
    return CODED_FACTOR_NAMES[1:] if codes_factors else FACTOR_NAMES
