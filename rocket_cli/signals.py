"""Ctrl-C and SIGTERM: the first stops a run where it can be resumed, the second ends it immediately."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The user's request to stop."""

    def __init__(self, announce: Callable[[], None]) -> None:
        """Create a request that is not made yet.

        Args:
            announce: confirms the request to the user. It runs in a signal handler, perhaps in the middle of a write to
                stderr, so it must not print through a stream.
        """
        self._announce = announce
        self._made = False

    def made(self) -> bool:
        """Return whether a signal has arrived."""
        return self._made

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Take the first signal as a request; the second raises KeyboardInterrupt, a third kills the process."""
        del signal_number, frame
        if self._made:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        self._made = True
        self._announce()


@contextmanager
def stopping_on_signals(announce: Callable[[], None]) -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM in the context; main thread only."""
    request = StopRequest(announce)
    previous = [(number, signal.signal(number, request.handle)) for number in _SIGNALS]
    try:
        yield request
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
