"""Backoff between retries, and their deadline. No network I/O."""

import random
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

_FIRST_SECONDS = 0.25
_LONGEST_SECONDS = 8.0


class RetryBudget:
    """Exponential backoff with a deadline.

    Args:
        seconds: seconds without any answer before giving up, >= 0.
        clock: monotonic clock in seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.reset()

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, >= 0."""
        return max(0.0, self._deadline - self._clock())

    def reset(self) -> None:
        """Restart the backoff and the deadline after an answer."""
        self._deadline = self._clock() + self._seconds
        self._longest = _FIRST_SECONDS

    def next_delay(self, retry_after: float | None = None) -> float | None:
        """Return the seconds to wait before the next retry, or None to give up.

        Args:
            retry_after: seconds that the server asked for, a lower bound on the wait.
        """
        longest = self._longest
        self._longest = min(2 * longest, _LONGEST_SECONDS)
        # Jitter: clients that lost the same server must not retry at the same moment.
        wait = max(retry_after or 0.0, longest * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        left = self.seconds_left
        if (retry_after or 0.0) > left or left == 0.0:
            return None
        # The last retry happens at the deadline, not before.
        return min(wait, left)


def retry_after_seconds(header: str | None, *, now: float | None = None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, as a number or a date; None if absent or not valid.

    Args:
        header: value of the header.
        now: current time in seconds since the epoch; None takes the clock.
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
