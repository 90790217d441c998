"""Progress of a run on stderr: a bar in a terminal, occasional lines elsewhere."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from rocket_core.config import stage_label
from rocket_core.report.formatting import clock_text, progress_text

STOPPING = "stopping after this layer or step; press Ctrl-C again to stop immediately"

_SECONDS_BETWEEN_LINES = 10.0


class ProgressView:
    """A display of a run's progress; this one shows nothing, for programs that read stdout and log stderr."""

    def show(self, stage: str, detail: str, fraction: float, seconds_left: float | None) -> None:
        """Show the state of the run.

        Args:
            stage: the current stage.
            detail: layer or amount that is being processed; may be empty.
            fraction: progress of the whole run, 0 to 1.
            seconds_left: estimate; None if unknown.
        """

    def announce_stop(self) -> None:
        """Announce that the run is about to stop; safe in a signal handler."""


class LineView(ProgressView):
    """A view for logs, with a line for each stage, and one every ten seconds in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._written_at = -math.inf

    def show(self, stage: str, detail: str, fraction: float, seconds_left: float | None) -> None:
        """Write a line if one is due."""
        now = self._clock()
        if stage == self._stage and now - self._written_at < _SECONDS_BETWEEN_LINES:
            return
        self._stage, self._written_at = stage, now
        left = "" if seconds_left is None else f", {clock_text(seconds_left)} left"
        what = ", ".join(part for part in (stage_label(stage), detail) if part)
        print_line(f"{progress_text(fraction)}{left}: {what}")

    def announce_stop(self) -> None:
        """Write directly to the descriptor, as the stream may be in the middle of a write."""
        os.write(2, f"rocket: {STOPPING}\n".encode())


class BarView(Progress, ProgressView):
    """A bar that is drawn by a separate thread and disappears at the end."""

    # On the class, because the constructor of the base draws a frame.
    _notice = ""

    def __init__(self, console: Console) -> None:
        super().__init__(
            # As wide as the longest stage, so that the bar does not move.
            TextColumn("{task.description:<22}", markup=False),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[percent]:>4}", markup=False),
            TextColumn("{task.fields[left]:>8} left", markup=False),
            TextColumn(
                "{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            console=console,
            transient=True,
            expand=True,
        )
        self._run = self.add_task("starting", total=1.0, percent="0%", left="-:--", detail="")

    def show(self, stage: str, detail: str, fraction: float, seconds_left: float | None) -> None:
        """Pass the state to the drawing thread."""
        self.update(
            self._run,
            description=stage_label(stage),
            completed=fraction,
            percent=progress_text(fraction),
            left="-:--" if seconds_left is None else clock_text(seconds_left),
            detail=detail,
        )

    def announce_stop(self) -> None:
        """Set a notice that is drawn with the next frame."""
        self._notice = STOPPING

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what a frame shows."""
        yield from super().get_renderables()
        if self._notice:
            yield Text(self._notice, style="yellow")


def progress_view(*, quiet: bool) -> AbstractContextManager[ProgressView]:
    """Return the view for this process's stderr.

    Args:
        quiet: whether to show nothing unless stderr is a terminal.
    """
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return BarView(console)
    return nullcontext(ProgressView() if quiet else LineView())


def hide_library_bars() -> None:
    """Disable the bars of transformers and the Hub's client, which would be drawn over ours; imports transformers."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def print_line(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"rocket: {text}\n")
    sys.stderr.flush()
