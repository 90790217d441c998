"""Maps of a model's layers and experts: a cell for each, by its block. Loads no torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rocket_core.candidates import CODE_KINDS, Candidate, LayerProfile
from rocket_core.report.figure import Column, Figure, Row, Value, known_names
from rocket_core.report.layer_places import LayerShape, places_of
from rocket_core.report.schema import LayerReport
from rocket_core.sizes.budget import bits_per_weight, kept_fraction, sparsity

_Layer: TypeAlias = LayerShape | LayerProfile | LayerReport

_MAP_NAMES = ("format", "kept_fraction", "bits_per_weight", "stored_bytes", "rank", "sparsity", "loss", "error")
# The number of an expert: the last one in the name of its layer.
_EXPERT = re.compile(r"\.(\d+)\.(?=[^.]+$)")


def allocation_map(layers: Iterable[LayerReport]) -> Figure:
    """Return what became of each layer, by block and projection.

    Args:
        layers: layers of a report, in model order.
    """
    layers = tuple(layers)
    found = [_stored_row(layer, layer.bits_per_weight, layer.sparsity, layer.error, layer) for layer in layers]
    return _map_of(found, layers, "error of the output")


def predicted_map(chosen: Iterable[tuple[_Layer, Candidate | None]]) -> Figure:
    """Return the same figure as `allocation_map` for an allocation that has not been carried out.

    Args:
        chosen: each layer with the candidate allocated to it, in model order; None where there is no allocation yet.
    """
    pairs = tuple(chosen)
    found = [
        dict.fromkeys(_MAP_NAMES) | {"layer": layer.name, "kind": "profiled"}
        if candidate is None
        else _predicted_row(layer, candidate)
        for layer, candidate in pairs
    ]
    return _map_of(found, [layer for layer, _ in pairs], "predicted error of the output")


def running_map(chosen: Iterable[tuple[_Layer, Candidate | None]], *, compressed: int) -> Figure:
    """Return the map of `predicted_map` for a job that runs, on which the cells of compressed layers are marked.

    Args:
        chosen: each layer with the candidate allocated to it, in model order; None where there is no allocation yet.
        compressed: number of the first layers that are compressed. Cells that combine layers are never marked.
    """
    layers = tuple(chosen)
    figure = predicted_map(layers)
    if not compressed:
        return figure
    places = [(place.block, place.projection) for place in places_of([layer.name for layer, _ in layers])]
    done = {*places[:compressed]} - {*places[compressed:]}
    rows = tuple({**row, "compressed": (row["block"], row["projection"]) in done} for row in figure.rows)
    return figure.model_copy(update={"rows": rows, "note": f"{figure.note} Those with a thick border are compressed."})


def expert_map(layers: Iterable[LayerReport]) -> Figure | None:
    """Return how much each expert of a mixture is used, and what is left of it; None for other models.

    Args:
        layers: layers of a report, in model order.
    """
    layers = tuple(layers)
    rows = _expert_rows(layers)
    if not rows:
        return None
    unused = sum(row["routed_tokens"] == 0 for row in rows)
    seen = f"; {unused} of {len(rows)} experts got none" if unused else ""
    usual = _usual_measures(layer.kind for layer in layers)
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
            Column(name="loss", title="predicted loss"),
            Column(name="error", title="error of the outputs"),
        ),
        rows=tuple(rows),
        measures=known_names(("share", *usual, "loss", "error", "routed_tokens", "stored_bytes"), rows),
    )


def _predicted_row(layer: _Layer, candidate: Candidate) -> Row:
    bits = bits_per_weight(layer.d_in, layer.d_out, candidate.stored_bytes)
    rows = layer.d_in if candidate.rank is None else candidate.rank
    zeros = None if candidate.nnz is None else sparsity(rows, layer.d_out, candidate.nnz)
    return _stored_row(layer, bits, zeros, candidate.reconstruction_error, candidate)


def _stored_row(
    layer: _Layer, bits: float | None, zeros: float | None, error: float, stored: LayerReport | Candidate
) -> Row:
    return {
        "layer": layer.name,
        "kind": stored.kind if stored.dictionary is None else f"{stored.kind}, shared",
        "format": _format_text(stored),
        "kept_fraction": kept_fraction(layer.d_in, layer.d_out, stored.kept_parameters),
        "bits_per_weight": bits,
        "stored_bytes": stored.stored_bytes,
        "rank": stored.rank,
        "sparsity": zeros,
        "loss": stored.loss,
        "error": error,
    }


def _format_text(stored: LayerReport | Candidate) -> str | None:
    """Return the format of codes; None if they are entropy coded, or the layer has none."""
    if stored.block_type is not None or stored.bits is None:
        return stored.block_type
    return f"{stored.bits} bits, groups of {stored.group_size}"


def _usual_measures(kinds: Iterable[Value]) -> tuple[str, str]:
    # The fraction of parameters tells nothing about layers that keep all of them in fewer bits.
    has_codes = any(kind in CODE_KINDS for kind in kinds)
    return ("bits_per_weight", "kept_fraction") if has_codes else ("kept_fraction", "bits_per_weight")


def _map_of(found: Sequence[Row], layers: Sequence[_Layer], error: str) -> Figure:
    places = places_of([layer.name for layer in layers])
    rows = _combined_experts([place.model_dump() | row for place, row in zip(places, found, strict=True)], layers)
    usual = _usual_measures(row["kind"] for row in rows)
    told = known_names((*usual, "kind", "stored_bytes", "loss", "error", "rank", "sparsity"), rows)
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
        Column(name="loss", title="predicted loss"),
        Column(name="error", title=error),
    )
    return Figure(
        name="allocation-map",
        title="Allocation map",
        note=f"Each cell is a layer{'; what its colour means can be chosen' if len(told) > 1 else ''}."
        f"{' The experts of a block are combined.' if len(rows) < len(found) else ''}",
        columns=columns,
        rows=tuple(rows),
        measures=told,
    )


def _combined_experts(rows: Sequence[Row], layers: Sequence[_Layer]) -> list[Row]:
    """Return the rows of an allocation map with those of all experts of a block and projection in one.

    Fractions and bits are means over the weights, bytes and losses sums, and errors root mean squares; the kind is the
    most frequent one.
    """
    groups: dict[tuple[Value, str], list[tuple[Row, int]]] = defaultdict(list)
    for number, (row, layer) in enumerate(zip(rows, layers, strict=True)):
        # The number keeps the rows of layers outside experts apart.
        place = str(number) if layer.routed_tokens is None else _EXPERT.sub(".*.", str(row["projection"]))
        groups[row["block"], place].append((row, layer.d_in * layer.d_out))
    return [found[0][0] if len(found) == 1 else _combined(found, place) for (_, place), found in groups.items()]


def _combined(found: Sequence[tuple[Row, int]], projection: str) -> Row:
    rows = [row for row, _ in found]
    total = sum(parameters for _, parameters in found)

    def mean(name: str) -> float:
        return sum(_number(row[name]) * parameters for row, parameters in found) / total

    if any(row["stored_bytes"] is None for row in rows):
        # There is no allocation yet.
        return rows[0] | {"projection": projection}
    formats = {row["format"] for row in rows}
    return rows[0] | {
        "projection": projection,
        "layer": f"{len(rows)} experts, {_EXPERT.sub('.*.', str(rows[0]['layer']))}",
        "kind": Counter(str(row["kind"]) for row in rows).most_common(1)[0][0],
        "format": formats.pop() if len(formats) == 1 else None,
        "kept_fraction": mean("kept_fraction"),
        "bits_per_weight": mean("bits_per_weight"),
        "stored_bytes": int(sum(_number(row["stored_bytes"]) for row in rows)),
        "rank": None,
        "sparsity": None,
        "loss": None if rows[0]["loss"] is None else sum(_number(row["loss"]) for row in rows),
        "error": _root_mean_square([_number(row["error"]) for row in rows]),
    }


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _root_mean_square(values: Sequence[float]) -> float:
    return float((sum(value**2 for value in values) / len(values)) ** 0.5)


def _expert_rows(layers: Sequence[LayerReport]) -> list[Row]:
    """Return one row for each expert: how much it is used, and what is left of its layers together."""
    experts: dict[tuple[str, str], list[LayerReport]] = defaultdict(list)
    for layer, place in zip(layers, places_of([layer.name for layer in layers]), strict=True):
        number = _EXPERT.search(layer.name)
        if layer.routed_tokens is not None and number is not None:
            experts[place.block, number[1]].append(layer)
    tokens: Counter[str] = Counter()
    for (block, _), found in experts.items():
        tokens[block] += found[0].routed_tokens or 0
    return [_expert_row(block, number, found, tokens[block]) for (block, number), found in experts.items()]


def _expert_row(block: str, expert: str, layers: Sequence[LayerReport], all_tokens: int) -> Row:
    routed = layers[0].routed_tokens or 0
    parameters = sum(layer.d_in * layer.d_out for layer in layers)
    stored = sum(layer.stored_bytes for layer in layers)
    losses = [layer.loss for layer in layers if layer.loss is not None]
    return {
        "block": block,
        "expert": expert,
        "routed_tokens": routed,
        "share": routed / all_tokens if all_tokens else 0.0,
        "bits_per_weight": 8 * stored / parameters,
        "kept_fraction": kept_fraction(parameters, 1, sum(layer.kept_parameters for layer in layers)),
        "stored_bytes": stored,
        "loss": sum(losses) if losses else None,
        "error": _root_mean_square([layer.error for layer in layers]),
    }
