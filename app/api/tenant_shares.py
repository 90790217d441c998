"""Resources shared by the requests of all tenants: slots and threads, of which each tenant gets only a part."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from app.services.access import Caller

Result = TypeVar("Result")


class TenantSlots:
    """Slots that requests occupy for a while; used from the event loop only.

    Without API keys there is one tenant, which may occupy all of them.

    Args:
        total: how many there are.
        share: how many one tenant may occupy where there are API keys.
    """

    def __init__(self, total: int, *, share: int) -> None:
        self.total = total
        self.share = min(share, total)
        self._taken: Counter[str] = Counter()

    def try_acquire(self, caller: Caller) -> bool:
        """Occupy a slot; return whether one was free for this caller."""
        most = self.total if caller.key_id is None else self.share
        if self._taken.total() >= self.total or self._taken[caller.tenant] >= most:
            return False
        self._taken[caller.tenant] += 1
        return True

    def release(self, caller: Caller) -> None:
        """Free an occupied slot."""
        self._taken[caller.tenant] -= 1
        if self._taken[caller.tenant] == 0:
            del self._taken[caller.tenant]


class Threads:
    """The threads for one kind of work that a caller may occupy.

    Args:
        limiter: all threads.
        own: those of the caller's tenant; None lets it occupy all.
    """

    def __init__(self, limiter: CapacityLimiter, own: CapacityLimiter | None) -> None:
        self._all = limiter
        self._own = own

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run a function in a thread and return its result."""
        if self._own is None:
            return await to_thread.run_sync(function, *arguments, limiter=self._all)
        # Not the task, as one task may run several functions at once.
        borrower = object()
        await self._own.acquire_on_behalf_of(borrower)
        try:
            return await to_thread.run_sync(function, *arguments, limiter=self._all)
        finally:
            self._own.release_on_behalf_of(borrower)


class SharedThreads:
    """Threads for one kind of work, of which a tenant occupies only a part; others wait at most for that part.

    Args:
        total: how many there are.
        share: how many one tenant may occupy where there are API keys.
    """

    def __init__(self, total: int, *, share: int) -> None:
        self._all = CapacityLimiter(total)
        self._share = share
        self._tenants: WeakValueDictionary[str, CapacityLimiter] = WeakValueDictionary()

    def of(self, caller: Caller) -> Threads:
        """Return the threads that a caller may occupy."""
        if caller.key_id is None:
            return Threads(self._all, None)
        own = self._tenants.get(caller.tenant)
        if own is None:
            own = self._tenants[caller.tenant] = CapacityLimiter(self._share)
        return Threads(self._all, own)
