"""How much of a model a compression may change, as its config.json and headers show it. Loads no torch."""

from collections.abc import Mapping

from rocket_core.config import CompressionConfig
from rocket_core.coverage import Coverage, coverage
from rocket_core.inspection.block_lists import block_of, compressed_lists, list_of
from rocket_core.inspection.footprint import ModelShape, describe_model, item_bytes
from rocket_core.inspection.model_fields import HIDDEN_SIZES, find_number
from rocket_core.inspection.weight_summary import WeightSummary


def coverage_of_headers(settings: Mapping[str, object], weights: WeightSummary, config: CompressionConfig) -> Coverage:
    """Return how much of a model is selected; a run, which builds the model, knows it exactly.

    Args:
        settings: the content of config.json.
        weights: summary of the safetensors headers.
        config: the compression.

    Raises:
        UnsupportedArchitectureError: no layer is left to compress.
        InvalidConfigError: matching the ignore patterns with names would take too much work.
    """
    vision = config.includes_vision
    selected = describe_model(settings, weights, ignore=config.ignore, vision=vision)
    everything = describe_model(settings, weights, vision=vision) if config.ignore else selected
    itemsize = item_bytes(weights, "auto", "the model")
    return coverage(
        config,
        weights.stored_bytes,
        selected=selected.compressible_parameters * itemsize,
        tables=_table_parameters(settings, weights, selected) * itemsize,
        tower=0 if vision else _tower_parameters(settings, weights) * itemsize,
        ignored=(everything.compressible_parameters - selected.compressible_parameters) * itemsize,
    )


def _table_parameters(settings: Mapping[str, object], weights: WeightSummary, model: ModelShape) -> int:
    """Return the parameters of token embedding and head: as many tables as have room outside of all blocks."""
    table = (find_number(settings, ("vocab_size",)) or 0) * (find_number(settings, HIDDEN_SIZES) or 0)
    if not table:
        return 0
    parts = (settings.get("text_config"), settings)
    tied = any(isinstance(part, Mapping) and part.get("tie_word_embeddings") is True for part in parts)
    outside = model.parameters - sum(weights.block_parameters.values())
    return min(1 if tied else 2, outside // table) * table


def _tower_parameters(settings: Mapping[str, object], weights: WeightSummary) -> int:
    towers = compressed_lists(settings, weights, vision=True) - compressed_lists(settings, weights)
    return sum(rows * columns for name, (rows, columns) in weights.matrices if list_of(block_of(name)) in towers)
