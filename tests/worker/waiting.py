"""Waiting for what another thread or process does."""

import time


def eventually(condition, *, within=30.0):
    """What a condition says once it says something true; fails the test if it never does."""
    until = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return answer
