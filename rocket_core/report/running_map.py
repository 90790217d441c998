"""The allocation map of a job that runs: layers that are profiled, allocated and compressed."""

from collections.abc import Iterable

from rocket_core.candidates import Candidate
from rocket_core.report.figures import Figure, predicted_map
from rocket_core.report.layer_places import LayerShape, places_of


def running_map(chosen: Iterable[tuple[LayerShape, Candidate | None]], *, compressed: int) -> Figure:
    """Return the map of `predicted_map`, on which the cells of compressed layers are marked.

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
