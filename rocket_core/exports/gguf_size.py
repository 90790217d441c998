"""Bytes of a GGUF file, from the settings, headers and tokenizer of a model. Loads no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocket_core.config import CompressionConfig
from rocket_core.errors import InvalidConfigError, UnsupportedExportError
from rocket_core.exports.gguf_file import Storage
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.inspection.headers.expert_stacks import expert_layers
from rocket_core.inspection.headers.model_fields import HIDDEN_SIZES, find_number
from rocket_core.inspection.headers.weight_summary import WeightSummary, storage_dtype

_STORAGES: dict[str, Storage] = {"F16": "F16", "float16": "F16", "BF16": "BF16", "bfloat16": "BF16"}


def dense_file_bytes(
    settings: Mapping[str, Any], weights: WeightSummary, config: CompressionConfig, folder: Path
) -> int | None:
    """Return the bytes of the GGUF file of a model with all matrices dense; None if none is asked for, or not known.

    Args:
        settings: the content of config.json, checked by `rocket_core.hub.requests`.
        weights: summary of the safetensors headers.
        config: the compression.
        folder: the model's folder, with its tokenizer.

    Raises:
        UnsupportedExportError: llama.cpp cannot express the model or its tokenizer.
    """
    if "gguf" not in config.export or not isinstance(settings.get("architectures"), list):
        return None
    # Weights in few bits are decoded.
    plain = {key: value for key, value in settings.items() if key != "quantization_config"}
    try:
        plan = plan_gguf(plain, folder)
    except (InvalidConfigError, UnsupportedExportError):
        if "vision_config" in settings:
            # A run knows what transformers adds to the settings of a text model or tower.
            return None
        raise
    stored = storage_dtype(weights, "the model") if config.dtype == "auto" else config.dtype
    dense = _STORAGES.get(stored, "F32")
    try:
        return plan.file_bytes((key, shape, dense) for key, shape in _tensors(settings, weights))
    except UnsupportedExportError:
        # A run knows more about names that transformers gives to tensors.
        return None


def _tensors(settings: Mapping[str, Any], weights: WeightSummary) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor, those of all experts split."""
    hidden_size = find_number(settings, HIDDEN_SIZES) or 0
    stacks = {name for name, _ in weights.stacks}
    for other in weights.others:
        if other.key.removesuffix(".weight") not in stacks:
            yield other.key, other.shape
    for name, shape in weights.matrices:
        yield f"{name}.weight", shape
    for name, stack in weights.stacks:
        for layer, (d_in, d_out) in expert_layers(name, stack, hidden_size):
            yield f"{layer}.weight", (d_out, d_in)
