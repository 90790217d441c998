"""The frontier figure of a profiled model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rocket_core.candidates import SizePoint
from rocket_core.report.figure import Figure
from rocket_core.report.figures import size_frontier

if TYPE_CHECKING:
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
