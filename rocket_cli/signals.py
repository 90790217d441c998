"""Ctrl-C and SIGTERM: the first asks a run to stop where it can go on later, the second ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the user has asked to stop."""

    def __init__(self, announce: Callable[[], None]) -> None:
        """Remember what to do when asked.

        Args:
            announce: tells the user that the wish is understood. It runs within a signal handler, perhaps in the
                middle of a write to stderr, so it must not print through a stream.
        """
        self._announce = announce
        self._made = False

    def made(self) -> bool:
        """Whether a signal has arrived."""
        return self._made

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Take the first signal as a request; the second raises KeyboardInterrupt, a third one kills."""
        del signal_number, frame
        if self._made:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        self._made = True
        self._announce()


@contextmanager
def stopping_on_signals(announce: Callable[[], None]) -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM while the block runs; main thread only."""
    request = StopRequest(announce)
    previous = [(number, signal.signal(number, request.handle)) for number in _SIGNALS]
    try:
        yield request
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
