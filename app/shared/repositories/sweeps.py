"""Work of the reconciler: notifies workers of jobs, reclaims jobs of dead workers, and deletes what has expired.

Several reconcilers may sweep at once: each statement does its work once, whichever comes first.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, exists, or_, select, update
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import ConflictError, JobNotFoundError, WorkerLostError
from app.shared.lifecycle import Status
from app.shared.models import Artifact, IdempotencyKey, Identity, Job, ModelPiece, OutboxRow, Upload, UploadedModel
from app.shared.outcomes import JobError, NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.jobs import enqueue_notification
from app.shared.repositories.leases import end_job, give_up
from app.shared.repositories.sources import is_in_use
from app.shared.requests import QUEUES, Queue

LEASE_LOST = "lease_lost"
"""Type of the event for a job that was taken from a worker which no longer reports."""

_BATCH = 100
_MOST_PARAMETERS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Notification:
    """A job to notify the workers of.

    Attributes:
        id: id of the outbox row.
        job_id: the job.
        queue: its queue, whose workers are notified.
    """

    id: int
    job_id: str
    queue: Queue


def list_notifications(
    session: Session, *, queues: Collection[Queue] = QUEUES, limit: int = _BATCH
) -> list[Notification]:
    """Return the notifications for some queues that have not been sent yet, oldest first."""
    statement = (
        select(OutboxRow.id, OutboxRow.job_id, Job.queue)
        .join(Job, Job.id == OutboxRow.job_id)
        .where(Job.queue.in_(queues))
        .order_by(OutboxRow.id)
        .limit(limit)
    )
    return [Notification(**row._mapping) for row in session.execute(statement)]


def delete_notifications(session: Session, sent: Sequence[Notification]) -> None:
    """Record that the broker has these notifications.

    Called after sending: after a crash in between, a message is sent twice, which is harmless, rather than never.
    """
    at = now(session)
    session.execute(delete(OutboxRow).where(OutboxRow.id.in_([row.id for row in sent])))
    notified = update(Job).where(Job.id.in_([row.job_id for row in sent])).values(rung_at=at)
    session.execute(notified)


def renotify(session: Session, *, notify_seconds: float) -> int:
    """Queue notifications for jobs that have waited longer than that since their last notification.

    Returns:
        Number of notifications.
    """
    at = now(session)
    statement = (
        select(Job.id)
        .where(
            Job.status == Status.QUEUED,
            Job.available_at <= at,
            or_(Job.rung_at.is_(None), Job.rung_at <= at - timedelta(seconds=notify_seconds)),
            ~exists().where(OutboxRow.job_id == Job.id),
        )
        .order_by(Job.id)
        .limit(_BATCH)
        .with_for_update(skip_locked=True)
    )
    waiting = session.scalars(statement).all()
    for job_id in waiting:
        enqueue_notification(session, job_id, at)
    return len(waiting)


def reclaim_expired(session: Session) -> list[str]:
    """Reclaim jobs whose lease has expired: they are queued again, failed if no attempt is left, or cancelled.

    Returns:
        The ids of the reclaimed jobs.
    """
    return _reclaim(session, Job.lease_until <= now(session))


def reclaim_claimed(session: Session) -> list[str]:
    """Reclaim all claimed jobs without waiting for their leases.

    It is for a service that holds the lock on its data folder, and so knows that no worker of an earlier one is left.

    Returns:
        The ids of the reclaimed jobs.
    """
    return _reclaim(session)


def requeue_job(session: Session, job_id: str) -> Job:
    """Take a job from its worker, e.g. if that hangs: further writes of the worker are refused, the attempt counts.

    Returns:
        The job as it is now: `queued`; `cancelled` if that was requested; `failed` if no attempt is left.

    Raises:
        JobNotFoundError: the job does not exist.
        ConflictError: no worker holds it.
    """
    statement = select(Job).where(Job.id == job_id).with_for_update().execution_options(populate_existing=True)
    job = session.scalars(statement).one_or_none()
    if job is None:
        raise JobNotFoundError("no job has this id; GET /jobs lists them")
    status = Status(job.status)
    if status.is_terminal:
        raise ConflictError(f"the job is {status}, which is final; `rocket retry` creates a new job from it")
    if not status.is_held:
        raise ConflictError("the job is already queued; if no worker claims it, check that one is running")
    _take(session, job, now(session), why="taken from its worker by the operator")
    session.refresh(job)
    return job


def expire_artifacts(session: Session) -> list[str]:
    """Delete the storage keys of expired artifacts, unless an unfinished job works on them.

    Returns:
        The storage keys to remove once the transaction is committed.
    """
    statement = (
        select(Artifact)
        .where(
            Artifact.expires_at <= now(session),
            Artifact.storage_key.is_not(None),
            ~is_in_use(Artifact.job_id),
        )
        .limit(_BATCH)
        .with_for_update(skip_locked=True)
    )
    keys = []
    for artifact in session.scalars(statement):
        keys.append(str(artifact.storage_key))
        artifact.storage_key = None
    session.flush()
    return keys


def forget_checkpoints(session: Session, *, retention: timedelta) -> None:
    """Release the checkpoints of jobs that ended long ago; a retry then starts from scratch."""
    ended = Job.finished_at <= now(session) - retention
    statement = update(Job).where(ended, Job.work_key.is_not(None)).values(work_key=None)
    session.execute(statement)


def forget_idempotency_keys(session: Session) -> None:
    """Delete expired idempotency keys."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.expires_at <= now(session)))


def find_orphans(session: Session, *, storage_keys: Collection[str], work_keys: Collection[str]) -> set[str]:
    """Return those of the files and folders found in storage that do not belong to any row.

    Args:
        session: a transaction that began after the folders were listed.
        storage_keys: names found in the artifact store.
        work_keys: names found among the work folders.
    """
    stored, worked = set(storage_keys), set(work_keys)
    for column, keys in (
        *((column, stored) for column in (Artifact.storage_key, Upload.storage_key, ModelPiece.storage_key)),
        *((column, worked) for column in (Job.work_key, UploadedModel.skeleton_key)),
    ):
        sorted_keys = sorted(keys)
        # Databases limit the number of parameters, and a store may have more files than that.
        for start in range(0, len(sorted_keys), _MOST_PARAMETERS):
            batch = sorted_keys[start : start + _MOST_PARAMETERS]
            keys.difference_update(session.scalars(select(column).where(column.in_(batch))))
    return stored | worked


def identity(session: Session) -> str:
    """Return the database's unique id."""
    return session.scalars(select(Identity.id)).one()


def _reclaim(session: Session, *conditions: ColumnElement[bool]) -> list[str]:
    at = now(session)
    held = select(Job).where(Job.fence.is_not(None), *conditions).order_by(Job.id).limit(_BATCH)
    statement = held.with_for_update(skip_locked=True)
    jobs = session.scalars(statement.execution_options(populate_existing=True)).all()
    for job in jobs:
        _take(session, job, at)
    return [job.id for job in jobs]


def _take(session: Session, job: Job, at: datetime, *, why: str = "the worker no longer reports") -> Status:
    data = {"worker": job.claimed_by or "", "attempt": job.attempt}
    event = NewEvent(type=LEASE_LOST, level="warning", message=why, data=data)
    append_event(session, job.id, event, at)
    if job.attempt < job.max_attempts:
        return give_up(session, job, at, available_at=at)
    error = JobError(
        code=WorkerLostError.code,
        message=f"the worker stopped reporting in {job.attempt} attempts; see its log, then retry the job",
        stage=job.stage,
    )
    return end_job(session, job, Status.FAILED, at, error=error.model_dump())
