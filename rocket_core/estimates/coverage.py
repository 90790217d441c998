"""How much of a model a compression may change. Loads no torch."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rocket_core.config import CompressionConfig
from rocket_core.estimates.footprint import ModelShape, describe_model
from rocket_core.inspection.headers.block_lists import block_of, compressed_lists, list_of
from rocket_core.inspection.headers.model_fields import HIDDEN_SIZES, find_number
from rocket_core.inspection.headers.weight_summary import WeightSummary, item_bytes
from rocket_core.schema import FrozenModel

LEAST_SELECTED = 0.5
"""Fraction of a model's bytes below which a compression can change little, which a warning says."""

_Bytes = Annotated[int, Field(ge=0)]


class Inclusion(FrozenModel):
    """A part of a model that could be compressed and is not selected."""

    how: str
    """what selects it, such as `include vision`."""
    bytes: _Bytes
    """its bytes in the checkpoint."""


class Coverage(FrozenModel):
    """The part of a model's bytes that is selected to be compressed."""

    model_bytes: _Bytes
    """bytes of all weights of the checkpoint."""
    selected_bytes: _Bytes
    """bytes of the selected layers, and of token embedding and head where the target may be met by quantizing them."""
    more: tuple[Inclusion, ...] = ()
    """what would select more of it."""

    @property
    def fraction(self) -> float:
        """The selected fraction of the bytes, [0, 1]."""
        return min(1.0, self.selected_bytes / self.model_bytes) if self.model_bytes else 0.0

    @property
    def warning(self) -> str | None:
        """A warning that little is selected, and what would select more; None if at least half is."""
        if self.fraction >= LEAST_SELECTED:
            return None
        said = [f"{part.how} ({_percent(part.bytes / self.model_bytes)} more)" for part in self.more if part.bytes]
        advice = f"to select more: {'; '.join(said)}" if said else "nothing else of it can be compressed"
        return (
            f"only {_percent(self.fraction)} of the model's bytes are selected to be compressed, and the rest stays as "
            f"it is; {advice}"
        )


def coverage(
    config: CompressionConfig, model_bytes: int, *, selected: int, tables: int, tower: int, ignored: int
) -> Coverage:
    """Return how much of a model is selected.

    Args:
        config: the compression.
        model_bytes: bytes of all weights.
        selected: bytes of the layers in blocks that are selected.
        tables: bytes of token embedding and head, as far as they can be quantized.
        tower: bytes of the layers in the blocks of a vision tower that are not selected.
        ignored: bytes of the layers that would be selected without `ignore`.
    """
    included = config.decides_tables
    more = (
        ("include vision, with images to calibrate on", 0 if config.includes_vision else tower),
        (_including_tables(config), 0 if included or not config.reader.tables else tables),
        ("fewer ignored layers", ignored),
    )
    return Coverage(
        model_bytes=model_bytes,
        selected_bytes=min(model_bytes, selected + (tables if included else 0)),
        more=tuple(Inclusion(how=how, bytes=count) for how, count in more if count),
    )


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
        weights.decoded_bytes,
        selected=selected.compressible_parameters * itemsize,
        tables=_table_parameters(settings, weights, selected) * itemsize,
        tower=0 if vision else _tower_parameters(settings, weights) * itemsize,
        ignored=(everything.compressible_parameters - selected.compressible_parameters) * itemsize,
    )


def _including_tables(config: CompressionConfig) -> str:
    if not config.quantizes:
        return "a size, or budget bytes and include embeddings"
    return "include embeddings" if "quantized" in config.kinds else "kind quantized and include embeddings"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


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
