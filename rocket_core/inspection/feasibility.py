"""Feasibility of a compression, judged from a model's headers. Loads no torch."""

from collections.abc import Mapping
from typing import Any

from rocket_core.config import CompressionConfig
from rocket_core.inspection.footprint import describe_model
from rocket_core.inspection.model_fields import check_sizes
from rocket_core.inspection.preconditions import check_ignore, check_weights, ratio_within
from rocket_core.inspection.safetensors_headers import WeightSummary


def check_feasible(settings: Mapping[str, Any], weights: WeightSummary, config: CompressionConfig, model: str) -> None:
    """Raise an error if the weights do not fit config.json, or cannot be made as small as requested.

    The check has less information than a run, and never rejects what a run accepts.

    Args:
        settings: the content of config.json.
        weights: summary of the safetensors headers.
        config: the compression; without a target any size is accepted.
        model: name of the model in messages.

    Raises:
        AlreadyQuantizedError: most weights are not plain floating-point numbers.
        CheckpointFormatError: a size in config.json exceeds what the weights hold.
        InfeasibleBudgetError: the ratio or the size cannot be reached.
        UnmatchedIgnoreError: a pattern of `ignore` matches no layer.
        UnsupportedArchitectureError: the model has nothing to compress.
    """
    check_weights(weights, config.ratio or 0.0, model)
    check_sizes(settings, weights, model)
    check_ignore(settings, weights, config.ignore, model)
    if config.target_bytes is not None:
        shape = describe_model(settings, weights, ignore=config.ignore, dtype=config.dtype)
        ratio_within(shape.shapes, config.target_bytes, itemsize=shape.itemsize, other_bytes=shape.other_bytes)
