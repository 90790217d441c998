"""Figures of what a profiled model is predicted to be."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rocket_core.candidates import SizePoint
from rocket_core.report.figure import Figure
from rocket_core.report.figures import size_frontier
from rocket_core.report.layer_maps import predicted_map

if TYPE_CHECKING:
    from app.services.profiles import Predicted
    from rocket_core.allocation.predictor import Predictor


def frontier_of(
    predictor: "Predictor",
    points: Sequence[Mapping[str, Any]],
    *,
    marked_bytes: int | None,
    marked_error: float | None = None,
) -> Figure:
    """Return the figure of a model's predicted size and error at every ratio.

    Args:
        predictor: the profiled model.
        points: `SizePoint`s as stored.
        marked_bytes: size to mark, in bytes; None marks none.
        marked_error: error to mark at that size; None marks the nearest point.
    """
    return size_frontier(
        [SizePoint.model_validate(point) for point in points],
        predictor.profile.objective,
        other_bytes=predictor.profile.other_bytes,
        marked_bytes=marked_bytes,
        marked_error=marked_error,
    )


def predicted_figures(
    predictor: "Predictor", points: Sequence[Mapping[str, Any]], predicted: "Predicted | None"
) -> dict[str, Figure | None]:
    """Return the `frontier` of a profiled model, with a prediction marked, and the predicted `allocation` if any."""
    if predicted is None:
        return {"frontier": frontier_of(predictor, points, marked_bytes=None), "allocation": None}
    error = predicted.allocation.total_error
    return {
        "frontier": frontier_of(predictor, points, marked_bytes=predicted.model_bytes, marked_error=error),
        "allocation": predicted_map(predictor.chosen(predicted.allocation)),
    }
