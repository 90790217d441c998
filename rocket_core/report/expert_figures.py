"""Experts of a mixture in figures: a block has hundreds of their layers. Loads no torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rocket_core.report.schema import LayerReport
from rocket_core.sizes.budget import kept_fraction

Value = str | int | float | None
Row = dict[str, Value]

# The number of an expert: the last one in the name of its layer.
_EXPERT = re.compile(r"\.(\d+)\.(?=[^.]+$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MapEntry:
    """A row of an allocation map, with the layer that it is about.

    Attributes:
        row: the row.
        parameters: parameters of the layer when dense.
        is_expert: whether it is a layer of an expert.
    """

    row: Row
    parameters: int
    is_expert: bool


def combined_experts(entries: Sequence[MapEntry]) -> list[Row]:
    """Return the rows of an allocation map with those of all experts of a block and projection in one.

    Fractions and bits are means over the weights, bytes and losses sums, and errors root mean squares; the kind is the
    most frequent one.
    """
    groups: dict[tuple[Value, str], list[MapEntry]] = defaultdict(list)
    for number, entry in enumerate(entries):
        place = _EXPERT.sub(".*.", str(entry.row["projection"])) if entry.is_expert else f"{number}"
        groups[entry.row["block"], place].append(entry)
    return [
        _combined(found, place) if found[0].is_expert and len(found) > 1 else found[0].row
        for (_, place), found in groups.items()
    ]


def _combined(entries: Sequence[MapEntry], projection: str) -> Row:
    rows = [entry.row for entry in entries]
    total = sum(entry.parameters for entry in entries)

    def mean(name: str) -> float:
        return sum(_number(entry.row[name]) * entry.parameters for entry in entries) / total

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
        "error": (sum(_number(row["error"]) ** 2 for row in rows) / len(rows)) ** 0.5,
    }


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def expert_rows(layers: Sequence[LayerReport], blocks: Sequence[str]) -> list[Row]:
    """Return one row for each expert: how much it is used, and what is left of its layers together.

    Args:
        layers: layers of a report.
        blocks: the block of each.
    """
    experts: dict[tuple[str, str], list[LayerReport]] = defaultdict(list)
    for layer, block in zip(layers, blocks, strict=True):
        number = _EXPERT.search(layer.name)
        if layer.routed_tokens is not None and number is not None:
            experts[block, number[1]].append(layer)
    tokens: Counter[str] = Counter()
    for (block, _), found in experts.items():
        tokens[block] += found[0].routed_tokens or 0
    return [_expert_row(block, number, found, tokens[block]) for (block, number), found in experts.items()]


def _expert_row(block: str, expert: str, layers: Sequence[LayerReport], all_tokens: int) -> Row:
    routed = layers[0].routed_tokens or 0
    parameters = sum(layer.d_in * layer.d_out for layer in layers)
    stored = sum(layer.stored_bytes for layer in layers)
    kept = sum(layer.kept_parameters for layer in layers)
    losses = [layer.loss for layer in layers if layer.loss is not None]
    errors = [layer.reconstruction_error if layer.achieved_error is None else layer.achieved_error for layer in layers]
    return {
        "block": block,
        "expert": expert,
        "routed_tokens": routed,
        "share": routed / all_tokens if all_tokens else 0.0,
        "bits_per_weight": 8 * stored / parameters,
        "kept_fraction": kept_fraction(parameters, 1, kept),
        "stored_bytes": stored,
        "loss": sum(losses) if losses else None,
        "error": (sum(error**2 for error in errors) / len(errors)) ** 0.5,
    }
