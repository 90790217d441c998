"""Limits on concurrent work, with a share for each tenant."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class NoSlotError(Exception):
    """No slot became free during the wait, or too many requests wait already.

    Attributes:
        is_own: whether the tenant itself holds all slots that it may have.
    """

    def __init__(self, *, is_own: bool) -> None:
        super().__init__("no slot is free")
        self.is_own = is_own


class TenantSemaphore:
    """A semaphore in which each tenant may hold only some of the slots.

    Args:
        most: number of slots.
        most_of_one: slots that one tenant may hold.
        waiting: how many requests may wait for a slot.
        waiting_of_one: how many of them may be one tenant's.
    """

    def __init__(self, *, most: int, most_of_one: int, waiting: int, waiting_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._most_waiting, self._most_waiting_of_one = waiting, waiting_of_one
        self._changed = threading.Condition()
        self._held: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def acquire(self, owner: str, seconds: float) -> Iterator[None]:
        """Hold a slot within the context.

        Args:
            owner: the tenant.
            seconds: how long to wait for a slot.

        Raises:
            NoSlotError: no slot became free, or too many requests wait already.
        """
        with self._changed:
            if not self._is_free(owner):
                self._wait(owner, seconds)
            self._held[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                _subtract(self._held, owner)
                self._changed.notify_all()

    def _wait(self, owner: str, seconds: float) -> None:
        if self._waiting[owner] >= self._most_waiting_of_one or self._waiting.total() >= self._most_waiting:
            raise self._refusal(owner)
        self._waiting[owner] += 1
        try:
            if not self._changed.wait_for(lambda: self._is_free(owner), seconds):
                raise self._refusal(owner)
        finally:
            _subtract(self._waiting, owner)

    def _is_free(self, owner: str) -> bool:
        return self._held.total() < self._most and self._held[owner] < self._most_of_one

    def _refusal(self, owner: str) -> NoSlotError:
        return NoSlotError(is_own=self._held[owner] >= self._most_of_one)


def _subtract(counts: Counter[str], owner: str) -> None:
    # Names of tenants without slots are not kept.
    counts[owner] -= 1
    if counts[owner] <= 0:
        del counts[owner]
