"""Observer of a run on this machine; importing it imports torch."""

from rocket_cli.progress_view import ProgressView, print_line
from rocket_cli.signals import StopRequest
from rocket_core.pipeline import Observer, Progress


class TerminalObserver(Observer):
    """Observer that shows a run on stderr and ends it when the user asks.

    Args:
        view: shows the progress.
        stop: the user's request to stop.
        quiet: whether warnings are left out.
    """

    def __init__(self, view: ProgressView, stop: StopRequest, *, quiet: bool) -> None:
        self._view = view
        self._stop = stop
        self._quiet = quiet

    def on_progress(self, progress: Progress) -> None:
        """Show the step."""
        self._view.show(progress.stage, progress.layer or "", progress.fraction, progress.seconds_left)

    def on_warning(self, warning: str) -> None:
        """Print the warning."""
        if not self._quiet:
            print_line(f"warning: {warning}")

    def should_cancel(self) -> bool:
        """Return whether a signal has arrived."""
        return self._stop.made()
