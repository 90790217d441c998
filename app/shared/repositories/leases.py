"""Who may work on a job: one worker at a time, for as long as it reports, and never again after that.

A claim gives the job a new fence. Whoever writes must name the fence that the row holds; a worker that slept past its
lease finds another there, or none, and is refused.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import CursorResult, select, update
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import FencedOutError
from app.shared.lifecycle import Status, move
from app.shared.models import Job
from app.shared.outcomes import JobError, NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.jobs import announce
from app.shared.requests import QUEUES, Queue

# Candidates read per look, so that workers that look at the same moment do not all fight for the oldest job.
_LOOK_AHEAD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to work on a job.

    Attributes:
        job_id: the job.
        fence: what proves it.
        claim_event: number of the event that tells of the claim; 0 where that does not matter.
    """

    job_id: str
    fence: str
    claim_event: int = 0


def claim_job(
    session: Session, job_id: str, *, worker: str, lease_seconds: float, queues: Collection[Queue] = QUEUES
) -> Lease | None:
    """Takes a queued job, or returns None if it is not to be had.

    Args:
        session: a writing transaction.
        job_id: the job.
        worker: who takes it.
        lease_seconds: how long the worker may be silent.
        queues: what the worker can run; a job of another queue is not to be had, whoever has sent it here.
    """
    at = now(session)
    fence = secrets.token_hex(16)
    taken = move(
        session,
        job_id,
        Status.RUNNING,
        Job.available_at <= at,
        Job.attempt < Job.max_attempts,
        Job.queue.in_(queues),
        at=at,
        attempt=Job.attempt + 1,
        fence=fence,
        claimed_by=worker,
        lease_until=at + timedelta(seconds=lease_seconds),
        progressed_at=at,
    )
    if not taken:
        return None
    first = update(Job).where(Job.id == job_id, Job.started_at.is_(None)).values(started_at=at)
    session.execute(first, execution_options={"synchronize_session": False})
    data = {"status": Status.RUNNING, "worker": worker}
    event = append_event(session, job_id, NewEvent(type="status", message="running", data=data), at)
    return Lease(job_id=job_id, fence=fence, claim_event=event)


def claim_next(
    session: Session, *, worker: str, lease_seconds: float, queues: Collection[Queue] = QUEUES
) -> Lease | None:
    """Takes the oldest queued job that is to be had, if any: all a worker needs when no message arrives."""
    statement = (
        select(Job.id)
        .where(Job.status == Status.QUEUED, Job.available_at <= now(session), Job.queue.in_(queues))
        .order_by(Job.id)
        .limit(_LOOK_AHEAD)
    )
    for job_id in session.scalars(statement).all():
        lease = claim_job(session, job_id, worker=worker, lease_seconds=lease_seconds, queues=queues)
        if lease is not None:
            return lease
    return None


def heartbeat(session: Session, lease: Lease, *, lease_seconds: float) -> Status:
    """Says that the worker lives.

    Returns:
        The job's status; `cancelling` asks the worker to stop.

    Raises:
        FencedOutError: the job was taken away.
    """
    until = now(session) + timedelta(seconds=lease_seconds)
    statement = update(Job).where(*_held_by(lease)).values(lease_until=until).returning(Job.status)
    status = session.execute(statement, execution_options={"synchronize_session": False}).scalar_one_or_none()
    if status is None:
        raise _fenced_out(lease)
    return Status(status)


def hold(session: Session, lease: Lease) -> Job:
    """The job of a lease, which nobody can take or end before this transaction is over.

    Raises:
        FencedOutError: the job was taken away.
    """
    statement = select(Job).where(*_held_by(lease)).with_for_update().execution_options(populate_existing=True)
    job = session.scalars(statement).one_or_none()
    if job is None:
        raise _fenced_out(lease)
    return job


def change(session: Session, lease: Lease, **changes: Any) -> None:
    """Writes columns of the job's row.

    Raises:
        FencedOutError: the job was taken away.
    """
    statement = update(Job).where(*_held_by(lease)).values(changes)
    result = session.execute(statement, execution_options={"synchronize_session": False})
    assert isinstance(result, CursorResult)
    if result.rowcount != 1:
        raise _fenced_out(lease)


def release_job(session: Session, lease: Lease) -> Status:
    """Gives a job back in good order, as when the worker is told to stop; the attempt does not count.

    Returns:
        Where the job is now: `queued`, or `cancelled` if that had been asked for.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    at = now(session)
    return give_up(session, job, at, available_at=at, attempt=Job.attempt - 1)


def fail_job(session: Session, lease: Lease, error: JobError, *, backoff_seconds: float = 0.0) -> Status:
    """Ends an attempt with an error: a retryable one waits for the next attempt as long as there is one.

    Args:
        session: a writing transaction.
        lease: the worker's.
        error: what went wrong.
        backoff_seconds: wait before the second attempt; doubles with each further one.

    Returns:
        Where the job is now: `queued` or `failed`, or `cancelled` if that had been asked for.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    at = now(session)
    event = NewEvent(type="error", level="error", message=error.message, data=error.model_dump())
    append_event(session, job.id, event, at)
    if error.retryable and job.attempt < job.max_attempts:
        wait = timedelta(seconds=backoff_seconds * 2 ** (job.attempt - 1))
        return give_up(session, job, at, available_at=at + wait)
    return end_job(session, job, Status.FAILED, at, error=error.model_dump())


def end_job(session: Session, job: Job, target: Status, at: datetime, **changes: Any) -> Status:
    """Moves a held job to its end; one that is being cancelled ends cancelled, whatever it has reached.

    The caller holds the job, see `hold`.
    """
    if job.status == Status.CANCELLING:
        target, changes = Status.CANCELLED, {}
    moved = move(session, job.id, target, Job.fence == job.fence, at=at, **changes)
    assert moved, f"{job.status} -> {target}"
    append_event(session, job.id, NewEvent(type="status", message=target, data={"status": target}), at)
    return target


def give_up(session: Session, job: Job, at: datetime, *, available_at: datetime, **changes: Any) -> Status:
    """Puts a held job back into the queue and announces it, or ends it if it is being cancelled.

    The caller holds the job, see `hold`.
    """
    if job.status == Status.CANCELLING:
        return end_job(session, job, Status.CANCELLED, at)
    moved = move(session, job.id, Status.QUEUED, Job.fence == job.fence, at=at, available_at=available_at, **changes)
    assert moved, f"{job.status} -> queued"
    announce(session, job.id, at)
    append_event(session, job.id, NewEvent(type="status", message="queued", data={"status": Status.QUEUED}), at)
    return Status.QUEUED


def _held_by(lease: Lease) -> tuple[Any, ...]:
    # Rows that nobody holds have no fence, see the table's check; comparing with None would find just those.
    return (Job.id == lease.job_id, Job.fence.is_not(None), Job.fence == lease.fence)


def _fenced_out(lease: Lease) -> FencedOutError:
    return FencedOutError(f"{lease.job_id} is no longer this worker's; it stops here and publishes nothing")
