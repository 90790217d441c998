"""Events that tests add to jobs."""

from app.shared.database import now
from app.shared.repositories.events import append_event
from app.shared.repositories.leases import lock_leased_job


def add_event(session, lease, event):
    """Append an event to a leased job and return its number."""
    return append_event(session, lock_leased_job(session, lease).id, event, now(session))
