"""Curves in a terminal, drawn with Braille patterns."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from rocket_client.models import Size

# Width of the axes to the left and right of the curve.
_LEFT, _RIGHT = 13, 14
_BETWEEN_TICKS = 10
_WIDEST = 80
_LOWEST, _HIGHEST = 6, 16
# Axes, command and first rows of the table should fit on the same screen.
_PART_OF_SCREEN = 3
_EMPTY_DOTS = "\N{BRAILLE PATTERN BLANK}"
_DOTS = r"[\u2801-\u28ff]+"


def error_curve(points: Sequence[Size], console: Console) -> Text | None:
    """Return a plot of the predicted error over the ratio, with a logarithmic axis of errors.

    None if the console cannot show it, or it would be empty.

    Args:
        points: the points, by rising ratio.
        console: console to print on.
    """
    width = min(_WIDEST, console.width - _LEFT - _RIGHT) // _BETWEEN_TICKS * _BETWEEN_TICKS
    can_draw = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    # Errors span orders of magnitude; one of 0, of a model that nothing is removed from, has no logarithm.
    curve = [(point.ratio, math.log10(point.error)) for point in points if point.error > 0]
    if not can_draw or width < 2 * _BETWEEN_TICKS or len(curve) < 2:
        return None
    ratios, errors = zip(*curve, strict=True)
    lowest, highest = min(errors), max(errors)
    import plotille

    figure = plotille.Figure()
    figure.width = width
    figure.height = min(_HIGHEST, max(_LOWEST, console.height // _PART_OF_SCREEN))
    # Colours are added below, as the terminal supports them.
    figure.with_colors = False
    figure.origin = False
    figure.linesep = "\n"
    figure.x_label, figure.y_label = "removed", "error"
    figure.x_ticks_fkt = lambda ratio, _: f"{100 * ratio:.0f}%"
    figure.y_ticks_fkt = lambda error, _: f"{10**error:.2g}"
    figure.set_x_limits(0.0, _last_tick(points[-1].ratio, width // _BETWEEN_TICKS))
    figure.set_y_limits(lowest, highest if highest > lowest else lowest + 1)
    figure.plot(ratios, errors)
    # Some fonts show the empty pattern as circles.
    drawn = Text(figure.show().replace(_EMPTY_DOTS, " "), no_wrap=True)
    drawn.rstrip()
    drawn.highlight_regex(_DOTS, "cyan")
    return drawn


def _last_tick(ratio: float, ticks: int) -> float:
    """Return the end of the axis for which each tick is a whole percentage."""
    return math.ceil(round(100 * ratio / ticks, 6)) * ticks / 100
