"""Waiting for another thread or process."""

import time

# Against what never happens, not against a busy machine; in seconds.
PATIENCE = 180.0


def eventually(condition, *, within=PATIENCE):
    """Return the value of a condition once it is true; fail the test if it never is."""
    until = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return answer
