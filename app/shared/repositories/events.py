"""Events of a job: numbered without gaps, so that a client can ask for those after the last it has seen."""

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.shared.models import Job, JobEvent
from app.shared.outcomes import NewEvent


def append_event(session: Session, job_id: str, event: NewEvent, at: datetime) -> int:
    """Append an event and return its number.

    The counter in the job's row serializes writers on both databases; with `max + 1`, two events could get one number.
    """
    statement = update(Job).where(Job.id == job_id).values(last_event=Job.last_event + 1).returning(Job.last_event)
    sequence = session.execute(statement).scalar_one()
    session.add(JobEvent(job_id=job_id, sequence=sequence, created_at=at, **event.model_dump()))
    session.flush()
    return sequence


def list_events(session: Session, job_id: str, *, after: int = 0, limit: int = 100) -> list[JobEvent]:
    """Return events in order.

    Args:
        session: a transaction.
        job_id: the job.
        after: number of the last event already seen.
        limit: maximum number of events.
    """
    statement = (
        select(JobEvent)
        .where(JobEvent.job_id == job_id, JobEvent.sequence > after)
        .order_by(JobEvent.sequence)
        .limit(limit)
    )
    return list(session.scalars(statement))


def list_typed_events(session: Session, job_id: str, kind: str) -> list[JobEvent]:
    """Return the events of one type in order: a handful among those of hundreds of layers."""
    statement = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.type == kind).order_by(JobEvent.sequence)
    return list(session.scalars(statement))


def find_last_event(session: Session, job_id: str, kind: str) -> JobEvent | None:
    """Return the newest event of one type; None if none exists."""
    statement = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.type == kind)
    return session.scalars(statement.order_by(JobEvent.sequence.desc()).limit(1)).one_or_none()
