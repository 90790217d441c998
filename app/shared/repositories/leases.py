"""Leases: a job has one worker at a time, for as long as that reports, and never again after that.

A claim gives the job a new fence. Every write must name the fence in the row; a worker whose lease has expired finds
another fence there, or none, and is refused.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.shared.database import change_rows, now
from app.shared.errors import FencedOutError
from app.shared.lifecycle import Status, move
from app.shared.models import Job
from app.shared.outcomes import JobError, NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.jobs import enqueue_notification
from app.shared.requests import QUEUES, Queue

# Candidates read per query, so that concurrent workers do not all compete for the oldest job.
_LOOK_AHEAD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A worker's right to work on a job.

    Attributes:
        job_id: the job.
        fence: token that proves it.
        claim_event: number of the event of the claim; 0 where that does not matter.
    """

    job_id: str
    fence: str
    claim_event: int = 0


def claim_job(
    session: Session, job_id: str, *, worker: str, lease_seconds: float, queues: Collection[Queue] = QUEUES
) -> Lease | None:
    """Claim a queued job; return None if it is not available.

    Args:
        session: a writing transaction.
        job_id: the job.
        worker: name of the worker.
        lease_seconds: how long the worker may be silent.
        queues: queues of the worker; jobs of other queues are not available to it, whatever messages it gets.
    """
    at = now(session)
    fence = secrets.token_hex(16)
    claimed = move(
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
    if not claimed:
        return None
    first = update(Job).where(Job.id == job_id, Job.started_at.is_(None)).values(started_at=at)
    session.execute(first)
    data = {"status": Status.RUNNING, "worker": worker}
    event = append_event(session, job_id, NewEvent(type="status", message="running", data=data), at)
    return Lease(job_id=job_id, fence=fence, claim_event=event)


def _available(at: datetime, queues: Collection[Queue]) -> tuple[Any, ...]:
    return (
        Job.status == Status.QUEUED,
        Job.available_at <= at,
        Job.attempt < Job.max_attempts,
        Job.queue.in_(queues),
    )


def is_any_available(session: Session, queues: Collection[Queue]) -> bool:
    """Return whether a job waits that a worker of these queues could claim."""
    return session.scalar(select(Job.id).where(*_available(now(session), queues)).limit(1)) is not None


def find_running(
    session: Session, *, worker: str, queues: Collection[Queue], without: Collection[str] = ()
) -> tuple[Job, Lease] | None:
    """Return the oldest job that another worker runs, if any, with the lease of that worker.

    Args:
        session: a transaction.
        worker: name of the worker that asks.
        queues: queues of that worker.
        without: fences of attempts to leave out.
    """
    statement = (
        select(Job)
        .where(
            Job.status == Status.RUNNING,
            Job.claimed_by != worker,
            Job.lease_until > now(session),
            Job.queue.in_(queues),
            Job.fence.not_in(without),
        )
        .order_by(Job.id)
        .limit(1)
    )
    job = session.scalars(statement).one_or_none()
    if job is None or job.fence is None:
        return None
    return job, Lease(job_id=job.id, fence=job.fence)


def note(session: Session, lease: Lease, event: NewEvent) -> None:
    """Append an event to a leased job.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    append_event(session, job.id, event, now(session))


def claim_next(
    session: Session, *, worker: str, lease_seconds: float, queues: Collection[Queue] = QUEUES
) -> Lease | None:
    """Claim the oldest available job, if any: all that a worker needs when no message arrives."""
    statement = select(Job.id).where(*_available(now(session), queues)).order_by(Job.id).limit(_LOOK_AHEAD)
    for job_id in session.scalars(statement).all():
        lease = claim_job(session, job_id, worker=worker, lease_seconds=lease_seconds, queues=queues)
        if lease is not None:
            return lease
    return None


def heartbeat(session: Session, lease: Lease, *, lease_seconds: float) -> Status:
    """Renew the lease.

    Returns:
        The job's status; `cancelling` asks the worker to stop.

    Raises:
        FencedOutError: the job was taken away.
    """
    until = now(session) + timedelta(seconds=lease_seconds)
    statement = update(Job).where(*_held_by(lease)).values(lease_until=until).returning(Job.status)
    status = session.execute(statement).scalar_one_or_none()
    if status is None:
        raise _fenced_out(lease)
    return Status(status)


def lock_leased_job(session: Session, lease: Lease) -> Job:
    """Return the job of a lease, locked until the end of the transaction.

    Raises:
        FencedOutError: the job was taken away.
    """
    statement = select(Job).where(*_held_by(lease)).with_for_update().execution_options(populate_existing=True)
    job = session.scalars(statement).one_or_none()
    if job is None:
        raise _fenced_out(lease)
    return job


def change(session: Session, lease: Lease, **changes: Any) -> None:
    """Change columns of the job's row.

    Raises:
        FencedOutError: the job was taken away.
    """
    if change_rows(session, update(Job).where(*_held_by(lease)).values(changes)) != 1:
        raise _fenced_out(lease)


def release_job(session: Session, lease: Lease) -> Status:
    """Release a job, e.g. when the worker is told to stop; the attempt does not count.

    Returns:
        The job's new status: `queued`, or `cancelled` if that was requested.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    at = now(session)
    return give_up(session, job, at, available_at=at, attempt=Job.attempt - 1)


def fail_job(session: Session, lease: Lease, error: JobError, *, backoff_seconds: float = 0.0) -> Status:
    """End an attempt with an error: after a retryable one, the job is queued again if attempts are left.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        error: the error.
        backoff_seconds: delay before the second attempt; doubles with each further one.

    Returns:
        The job's new status: `queued` or `failed`, or `cancelled` if that was requested.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    at = now(session)
    event = NewEvent(type="error", level="error", message=error.message, data=error.model_dump())
    append_event(session, job.id, event, at)
    if error.retryable and job.attempt < job.max_attempts:
        wait = timedelta(seconds=backoff_seconds * 2 ** (job.attempt - 1))
        return give_up(session, job, at, available_at=at + wait)
    return end_job(session, job, Status.FAILED, at, error=error.model_dump())


def end_job(session: Session, job: Job, target: Status, at: datetime, **changes: Any) -> Status:
    """Move a held job to a final status, or to `cancelled`, whatever its result, if it is being cancelled.

    The caller must hold the job, see `lock_leased_job`.
    """
    if job.status == Status.CANCELLING:
        target, changes = Status.CANCELLED, {}
    moved = move(session, job.id, target, Job.fence == job.fence, at=at, **changes)
    assert moved, f"{job.status} -> {target}"
    append_event(session, job.id, NewEvent(type="status", message=target, data={"status": target}), at)
    return target


def give_up(session: Session, job: Job, at: datetime, *, available_at: datetime, **changes: Any) -> Status:
    """Requeue a held job and notify the workers, or cancel it if it is being cancelled.

    The caller must hold the job, see `lock_leased_job`.
    """
    if job.status == Status.CANCELLING:
        return end_job(session, job, Status.CANCELLED, at)
    moved = move(session, job.id, Status.QUEUED, Job.fence == job.fence, at=at, available_at=available_at, **changes)
    assert moved, f"{job.status} -> queued"
    enqueue_notification(session, job.id, at)
    append_event(session, job.id, NewEvent(type="status", message="queued", data={"status": Status.QUEUED}), at)
    return Status.QUEUED


def _held_by(lease: Lease) -> tuple[Any, ...]:
    # The fence of rows that are not held is null; comparing it with None would match just those.
    return (Job.id == lease.job_id, Job.fence.is_not(None), Job.fence == lease.fence)


def _fenced_out(lease: Lease) -> FencedOutError:
    return FencedOutError(
        f"{lease.job_id} no longer belongs to this worker, which stops working on it and publishes nothing"
    )
