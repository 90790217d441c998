"""Limits on open event streams and waiting requests."""

from app.api.tenant_shares import TenantSlots
from app.services.access import Caller
from app.shared.errors import TooManyStreamsError

SECONDS_BETWEEN_LOOKS = 1.0


class Streams:
    """The open streams of this process; used from the event loop only.

    Args:
        limit: how many may be open.
        share: how many one tenant may have open where there are API keys.
    """

    def __init__(self, limit: int, *, share: int) -> None:
        self._slots = TenantSlots(limit, share=share)
        self.are_closing = False

    def acquire(self, caller: Caller) -> None:
        """Count an opened stream.

        Raises:
            TooManyStreamsError: all streams, or all that the caller's tenant may open, are in use.
        """
        if not self._slots.try_acquire(caller):
            raise TooManyStreamsError(
                "the limit on open event streams is reached; poll GET /jobs/{id}, or try again later"
            )

    def release(self, caller: Caller) -> None:
        """Count a closed stream."""
        self._slots.release(caller)

    def close(self) -> None:
        """End all streams within a second; called when the service stops, which would otherwise wait for them."""
        self.are_closing = True
