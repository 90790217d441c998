"""Signing in to the pages: a database session for a valid API key.

The cookie holds a random token, of which the database stores a hash, so any replica knows the session, and signing
out ends it for every copy of the cookie. A session grants no more than its key.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from app.services import access
from app.services.access import Caller
from app.services.context import Context
from app.shared.errors import UnauthenticatedError
from app.shared.repositories import audit, keys, sessions
from app.shared.repositories.audit import Action, Actor

SESSION_SECONDS = 12 * 3600
_RECORDED_FAILURES = 30
_WINDOW_SECONDS = 60.0


class FailureBudget:
    """The number of failed sign-ins that a process records, so that a flood of them cannot fill the database.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._window_ends_at = float("-inf")
        self._left = 0
        self._omitted = 0

    def spend(self) -> int | None:
        """Return how many failures were omitted since the last record; None if this one is to be omitted too."""
        with self._lock:
            if self._clock() >= self._window_ends_at:
                self._window_ends_at = self._clock() + _WINDOW_SECONDS
                self._left = _RECORDED_FAILURES
            if self._left == 0:
                self._omitted += 1
                return None
            self._left -= 1
            omitted, self._omitted = self._omitted, 0
            return omitted


def sign_in(context: Context, key: str, client: Actor, failures: FailureBudget) -> str:
    """Open a session for a key.

    Args:
        context: the service.
        key: the presumed key, as entered.
        client: the client, as far as it is known.
        failures: budget for recording failures.

    Returns:
        The token of the session.

    Raises:
        UnauthenticatedError: the key is not valid.
    """
    try:
        caller = access.authenticate(context.database, f"Bearer {key}", is_local=False)
    except UnauthenticatedError:
        omitted = failures.spend()
        if omitted is not None:
            _record_failure(context, key, client, omitted)
        raise
    assert caller.key_id is not None
    actor = Actor(tenant=caller.tenant, name=caller.key_id, address=client.address, request_id=client.request_id)
    with context.database.transaction() as session:
        opened = sessions.open_session(session, caller.key_id, lifetime=timedelta(seconds=SESSION_SECONDS))
        audit.record(session, actor, Action.SIGN_IN, subject=opened.row.id)
    return opened.token


def _record_failure(context: Context, key: str, client: Actor, omitted: int) -> None:
    with context.database.transaction() as session:
        # A revoked or expired key, or one of which only the id is known.
        named = keys.find_named(session, key)
        actor = client if named is None else client.on_behalf_of(named.tenant)
        subject = None if named is None else named.id
        audit.record(session, actor, Action.SIGN_IN, subject=subject, outcome="failure", detail={"omitted": omitted})


def sign_out(context: Context, caller: Caller, actor: Actor) -> None:
    """End the caller's session, if there is one."""
    if caller.session_id is None:
        return
    with context.database.transaction() as session:
        if sessions.end_session(session, caller.session_id):
            audit.record(session, actor, Action.SIGN_OUT, subject=caller.session_id)
