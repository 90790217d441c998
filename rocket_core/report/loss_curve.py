"""The figure of healing: the divergence from the original by the tokens read. Loads no torch."""

from collections.abc import Iterable

from rocket_core.report.figures import Column, Figure
from rocket_core.report.healing import HealingPoint


def loss_curve(points: Iterable[HealingPoint]) -> Figure:
    """Return the loss curve of healing.

    Args:
        points: the points so far, in order.
    """
    return Figure(
        name="loss-curve",
        title="Loss curve",
        note="Divergence from the original's predictions, in nats per token, by the tokens read: the line is that of "
        "the text as it was read, the points that of windows which no step reads. The values with the lowest point are "
        "kept.",
        columns=(
            Column(name="step", title="step", kind="count"),
            Column(name="tokens", title="tokens read", kind="count"),
            Column(name="training", title="divergence on the text read"),
            Column(name="held_out", title="divergence on held-out windows"),
        ),
        rows=tuple(point.model_dump() for point in points),
    )
