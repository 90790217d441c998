"""Figures about a compression, as data: each figure is a table with a title. Loads no torch.

The same rows are plotted, shown as a table, and offered as JSON and CSV, so that a figure shows nothing that its data
do not contain.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from rocket_core.candidates import CODE_KINDS, Candidate, SizePoint
from rocket_core.config import Objective, stage_label
from rocket_core.report.expert_figures import MapEntry, Row, Value, combined_experts, expert_rows
from rocket_core.report.layer_places import LayerShape, Place, places_of
from rocket_core.report.schema import CompressionReport, LayerReport
from rocket_core.schema import FrozenModel
from rocket_core.sizes.budget import bits_per_weight, kept_fraction, sparsity

ColumnKind = Literal["text", "count", "fraction", "number", "seconds", "bytes", "energy"]

ERROR_NAMES: Mapping[Objective, str] = {
    "fisher": "predicted increase of the loss, nats per token",
    "whitened": "sum of the squared relative errors of all outputs",
    "weight": "sum of the relative errors of all weights",
}
"""Meaning of a total error; for models that do not predict tokens, `fisher` is the change of the output."""

# Spreadsheets treat values with these prefixes as formulas.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MAP_COLUMNS = (*("format", "kept_fraction", "bits_per_weight", "stored_bytes", "rank", "sparsity", "loss", "error"),)


class Column(FrozenModel):
    """A column of a figure's data."""

    name: str
    """key in the rows."""
    title: str
    """meaning of the values, with their unit."""
    kind: ColumnKind = "number"
    """how a value is formatted."""


class Figure(FrozenModel):
    """A figure as data."""

    name: str
    """identifier of the figure, by which a page draws it."""
    title: str
    """what it shows."""
    note: str
    """how to read it."""
    columns: tuple[Column, ...]
    """columns of the rows."""
    rows: tuple[dict[str, Value], ...]
    """one row for each item that is drawn."""
    options: dict[str, Value] = Field(default_factory=dict)
    """data for the drawing in addition to the rows, such as a marked value."""
    measures: tuple[str, ...] = ()
    """names of columns that the marks can be coloured by, the usual one first."""

    def csv(self) -> str:
        """Return the rows as CSV (RFC 4180), with a header line."""
        stream = io.StringIO(newline="")
        names = [column.name for column in self.columns]
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows([_cell(row.get(name)) for name in names] for row in self.rows)
        return stream.getvalue()


def allocation_map(layers: Iterable[LayerReport]) -> Figure:
    """Return what became of each layer, by block and projection.

    Args:
        layers: layers of a report, in model order.
    """
    layers = tuple(layers)
    places = places_of([layer.name for layer in layers])
    rows = [
        {
            "block": place.block,
            "projection": place.projection,
            "layer": layer.name,
            "kind": _kind_name(layer.kind, layer.dictionary),
            "format": _format_text(layer),
            "kept_fraction": kept_fraction(layer.d_in, layer.d_out, layer.kept_parameters),
            "bits_per_weight": layer.bits_per_weight,
            "stored_bytes": layer.stored_bytes,
            "rank": layer.rank,
            "sparsity": layer.sparsity,
            "loss": layer.loss,
            "error": layer.reconstruction_error if layer.achieved_error is None else layer.achieved_error,
        }
        for place, layer in zip(places, layers, strict=True)
    ]
    return _map_of(rows, layers, "error of the output")


def expert_map(layers: Iterable[LayerReport]) -> Figure | None:
    """Return how much each expert of a mixture is used, and what is left of it; None for other models.

    Args:
        layers: layers of a report, in model order.
    """
    layers = tuple(layers)
    rows = expert_rows(layers, [place.block for place in places_of([layer.name for layer in layers])])
    if not rows:
        return None
    unused = sum(row["routed_tokens"] == 0 for row in rows)
    seen = f"; {unused} of {len(rows)} experts got none" if unused else ""
    has_codes = any(layer.kind in CODE_KINDS for layer in layers)
    usual = ("bits_per_weight", "kept_fraction") if has_codes else ("kept_fraction", "bits_per_weight")
    measures = ("share", *usual, "loss", "error", "routed_tokens", "stored_bytes")
    return Figure(
        name="expert-map",
        title="Experts",
        note="Each cell is an expert: its part of the calibration tokens that the router of its block sent, or what is "
        f"left of its layers together{seen}.",
        columns=(
            Column(name="block", title="block", kind="text"),
            Column(name="expert", title="expert", kind="text"),
            Column(name="routed_tokens", title="calibration tokens", kind="count"),
            Column(name="share", title="part of the block's tokens", kind="fraction"),
            Column(name="bits_per_weight", title="bits on disk per weight"),
            Column(name="kept_fraction", title="kept fraction of the parameters", kind="fraction"),
            Column(name="stored_bytes", title="bytes on disk", kind="bytes"),
            Column(name="loss", title="predicted increase of the loss"),
            Column(name="error", title="error of the outputs"),
        ),
        rows=tuple(rows),
        measures=tuple(name for name in measures if any(row[name] is not None for row in rows)),
    )


def predicted_map(chosen: Iterable[tuple[LayerShape, Candidate | None]]) -> Figure:
    """Return the same figure as `allocation_map` for an allocation that has not been carried out.

    Args:
        chosen: each layer with the candidate allocated to it, in model order; None where there is no allocation yet.
    """
    pairs = tuple(chosen)
    places = places_of([layer.name for layer, _ in pairs])
    rows = [
        _predicted_row(place, layer, candidate)
        if candidate is not None
        else dict.fromkeys(_MAP_COLUMNS) | {**place.model_dump(), "layer": layer.name, "kind": "profiled"}
        for place, (layer, candidate) in zip(places, pairs, strict=True)
    ]
    return _map_of(rows, [layer for layer, _ in pairs], "predicted error of the output")


def _predicted_row(place: Place, layer: LayerShape, candidate: Candidate) -> Row:
    return {
        "block": place.block,
        "projection": place.projection,
        "layer": layer.name,
        "kind": _kind_name(candidate.kind, candidate.dictionary),
        "format": _format_text(candidate),
        "kept_fraction": kept_fraction(layer.d_in, layer.d_out, candidate.kept_parameters),
        "bits_per_weight": bits_per_weight(layer.d_in, layer.d_out, candidate.stored_bytes),
        "stored_bytes": candidate.stored_bytes,
        "rank": candidate.rank,
        "sparsity": _sparsity(layer, candidate),
        "loss": candidate.loss,
        "error": candidate.reconstruction_error,
    }


def predicted_and_achieved(layers: Iterable[LayerReport]) -> Figure:
    """Return the error predicted by the profile and the achieved one, for each layer that is not dense."""
    rows = tuple(
        {
            "layer": layer.name,
            "kind": layer.kind,
            "predicted": layer.reconstruction_error,
            "achieved": layer.achieved_error,
        }
        for layer in layers
        if layer.achieved_error is not None and layer.kind != "dense"
    )
    return Figure(
        name="predicted-and-achieved",
        title="Predicted and achieved",
        note="Each point is a compressed layer: the error of its output that the profile predicted, and that of what "
        "was stored. Below the line a layer became better than predicted, above it worse.",
        columns=(
            Column(name="layer", title="layer", kind="text"),
            Column(name="kind", title="stored as", kind="text"),
            Column(name="predicted", title="predicted error"),
            Column(name="achieved", title="achieved error"),
        ),
        rows=rows,
    )


def stage_times(report: CompressionReport) -> Figure:
    """Return the cost of each stage; columns without any known value are left out."""
    rows = tuple(
        {
            "stage": stage_label(stage.name),
            "seconds": stage.seconds,
            "peak_memory_bytes": stage.peak_memory_bytes,
            "peak_device_bytes": stage.peak_device_bytes,
            "energy_kwh": None if stage.energy is None else stage.energy.kwh,
            "device": stage.device,
        }
        for stage in report.stages
    )
    columns = (
        Column(name="stage", title="stage", kind="text"),
        Column(name="seconds", title="wall time", kind="seconds"),
        Column(name="peak_memory_bytes", title="most memory", kind="bytes"),
        Column(name="peak_device_bytes", title="most memory of the accelerator", kind="bytes"),
        Column(name="energy_kwh", title="energy", kind="energy"),
        Column(name="device", title="computed on", kind="text"),
    )
    known = tuple(column for column in columns if any(row[column.name] is not None for row in rows))
    return Figure(
        name="stage-times",
        title="Cost of each stage",
        note="Wall time, and energy where it is known; of a run that was resumed, all its parts added up.",
        columns=known,
        rows=tuple({column.name: row[column.name] for column in known} for row in rows),
    )


def size_frontier(
    points: Iterable[SizePoint],
    objective: Objective,
    *,
    other_bytes: int,
    marked_bytes: int | None = None,
    marked_error: float | None = None,
) -> Figure:
    """Return the predicted size and error of a model at every ratio.

    Args:
        points: points by rising ratio.
        objective: the objective that errors measure.
        other_bytes: bytes of the model other than the compressible layers.
        marked_bytes: a size to mark; None marks none.
        marked_error: error of what is marked, not a point if it decides about more than the layers; None
            marks the point of the nearest size.
    """
    return Figure(
        name="size-frontier",
        title="Size and predicted error",
        note=f"Each point is the best model of its size; the error is the {ERROR_NAMES[objective]}.",
        columns=(
            Column(name="ratio", title="ratio removed", kind="fraction"),
            Column(name="model_bytes", title="size of all weights", kind="bytes"),
            Column(name="kept_parameters", title="kept parameters", kind="count"),
            Column(name="error", title="predicted error"),
        ),
        rows=tuple(
            {
                "ratio": point.ratio,
                "model_bytes": other_bytes + point.stored_bytes,
                "kept_parameters": point.kept_parameters,
                "error": point.error,
            }
            for point in points
        ),
        options={"marked_bytes": marked_bytes, "marked_error": marked_error},
    )


def _format_text(stored: LayerReport | Candidate) -> str | None:
    """Return the format of codes; None if they are entropy coded, or the layer has none."""
    if stored.block_type is not None or stored.bits is None:
        return stored.block_type
    return f"{stored.bits} bits, groups of {stored.group_size}"


def _map_of(found: Sequence[Row], layers: Sequence[LayerReport | LayerShape], error: str) -> Figure:
    entries = (
        MapEntry(row=row, parameters=layer.d_in * layer.d_out, is_expert=layer.routed_tokens is not None)
        for row, layer in zip(found, layers, strict=True)
    )
    rows = combined_experts(tuple(entries))
    # The fraction of parameters tells nothing about layers that keep all of them in fewer bits.
    has_codes = any(row["kind"] in CODE_KINDS for row in rows)
    usual = ("bits_per_weight", "kept_fraction") if has_codes else ("kept_fraction", "bits_per_weight")
    measures = (*usual, "kind", "stored_bytes", "loss", "error", "rank", "sparsity")
    told = tuple(name for name in measures if any(row[name] is not None for row in rows))
    columns = (
        Column(name="block", title="block", kind="text"),
        Column(name="projection", title="projection", kind="text"),
        Column(name="kind", title="stored as", kind="text"),
        *([Column(name="format", title="format", kind="text")] if any(row["format"] for row in rows) else []),
        Column(name="kept_fraction", title="kept fraction of the parameters", kind="fraction"),
        Column(name="bits_per_weight", title="bits on disk per weight"),
        Column(name="stored_bytes", title="bytes on disk", kind="bytes"),
        Column(name="rank", title="rank", kind="count"),
        Column(name="sparsity", title="fraction of zeros", kind="fraction"),
        Column(name="loss", title="predicted increase of the loss"),
        Column(name="error", title=error),
    )
    return Figure(
        name="allocation-map",
        title="Allocation map",
        note=(
            "Each cell is a layer; what its colour means can be chosen." if len(told) > 1 else "Each cell is a layer."
        )
        + (" The experts of a block are combined." if len(rows) < len(found) else ""),
        columns=columns,
        rows=tuple(rows),
        measures=told,
    )


def _kind_name(kind: str, dictionary: str | None) -> str:
    return kind if dictionary is None else f"{kind}, shared"


def _sparsity(layer: LayerShape, candidate: Candidate) -> float | None:
    if candidate.nnz is None:
        return None
    rows = layer.d_in if candidate.rank is None else candidate.rank
    return sparsity(rows, layer.d_out, candidate.nnz)


def _cell(value: Value) -> Value:
    # Names come from untrusted models.
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
