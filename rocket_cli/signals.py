"""Ctrl-C and SIGTERM: the first stops a command in order, every later one aborts it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt() -> None:
    """Raise KeyboardInterrupt, and let the next signal kill the process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


class StopRequest:
    """The user's request to stop."""

    def __init__(self, stop: Callable[[], None], abort: Callable[[], None]) -> None:
        self._stop = stop
        self._abort = abort
        self._made = False

    def made(self) -> bool:
        """Return whether a signal has arrived."""
        return self._made

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Take the first signal as a request to stop, and later ones as requests to abort."""
        del signal_number, frame
        if self._made:
            self._abort()
        else:
            self._made = True
            self._stop()


@contextmanager
def stopping_on_signals(stop: Callable[[], None], abort: Callable[[], None] = interrupt) -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM in the context; main thread only.

    Both functions run in a signal handler, at any point of the main thread: they must not wait for a lock, nor print
    through a stream, which may be in the middle of a write.

    Args:
        stop: called on the first signal.
        abort: called on every later signal.
    """
    request = StopRequest(stop, abort)
    previous = [(number, signal.signal(number, request.handle)) for number in _SIGNALS]
    try:
        yield request
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
