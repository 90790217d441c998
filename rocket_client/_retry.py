"""How long a client waits before it asks again, and when it has waited enough. Knows no network."""

import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

_FIRST_SECONDS = 0.25
_LONGEST_SECONDS = 8.0


class Patience:
    """Waits that double, up to a time after which it is enough.

    Args:
        seconds: without any answer before giving up, >= 0.
        clock: seconds from anywhere.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.renew()

    @property
    def seconds_left(self) -> float:
        """Until it is enough."""
        return max(0.0, self._deadline - self._clock())

    def renew(self) -> None:
        """Begin anew, as there was an answer."""
        self._deadline = self._clock() + self._seconds
        self._longest = _FIRST_SECONDS

    def next_wait(self, asked_for: float | None = None) -> float | None:
        """Seconds to wait now, or None if that would be too long.

        Args:
            asked_for: what the server asked for; at least that is waited.
        """
        longest = self._longest
        self._longest = min(2 * longest, _LONGEST_SECONDS)
        # Clients that lost the same server must not come back at the same moment.
        wait = max(asked_for or 0.0, longest * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        left = self.seconds_left
        if (asked_for or 0.0) > left or left == 0.0:
            return None
        # The last try is made when the time is over, not before.
        return min(wait, left)


def retry_after_seconds(header: str | None, *, now: float | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks for, written as a number or as a date; None if it says nothing.

    Args:
        header: its value.
        now: seconds since the epoch; None takes the clock.
    """
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, at.timestamp() - (time.time() if now is None else now))
