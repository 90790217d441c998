"""Operations of clients on jobs."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import ColumnElement, Select, delete, exists, func, insert, literal, select, type_coerce
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from app.shared.database import insert_if_new, now
from app.shared.errors import ConflictError, IdempotencyKeyReusedError, JobNotFoundError
from app.shared.lifecycle import Status, move
from app.shared.logging import current_request_id
from app.shared.models import (
    LOCAL_OWNER,
    AllocationRow,
    Artifact,
    IdempotencyKey,
    Job,
    JobEvent,
    LayerProfileRow,
    OutboxRow,
)
from app.shared.outcomes import NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.identifiers import new_id
from app.shared.repositories.removed import Removed
from app.shared.repositories.sources import check_uploads, find_source, is_in_use
from app.shared.requests import JobRequest, Queue

_TOKEN_EVENT = "hub_token"  # noqa: S105 - the type of an event
_TOKEN_IS_GONE = NewEvent(
    type=_TOKEN_EVENT,
    level="warning",
    message="the Hub token of the job that this one repeats was forgotten when that ended; this one continues "
    "without it. Send Hub-Token with the retry if the Hub asks for it",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Idempotency:
    """A key under which a client may send the same request again.

    Attributes:
        key: the client's key.
        lifetime: how long it is stored.
    """

    key: str
    lifetime: timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The answer to a request for a job.

    Attributes:
        job: the job.
        created: False if an earlier request had already created it.
    """

    job: Job
    created: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """A filter for lists of jobs.

    Attributes:
        status: only jobs with this status; None for all.
        metadata: labels with their values; a job must have all of them.
    """

    status: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()


ALL_JOBS = JobFilter()


def create_job(
    session: Session,
    request: JobRequest,
    *,
    max_attempts: int,
    owner: str = LOCAL_OWNER,
    idempotency: Idempotency | None = None,
    hub_token: str | None = None,
    default_queue: Queue = "cpu",
    warnings: Sequence[str] = (),
) -> Submission:
    """Create a job and its notification, or return the job that an identical earlier request created.

    Args:
        session: a writing transaction.
        request: the job's request.
        max_attempts: upper bound on the number of attempts.
        owner: the tenant.
        idempotency: key under which the request may be repeated; the token is not compared.
        hub_token: the Hub token that came with it, encrypted.
        default_queue: queue of a request that names none.
        warnings: what its client should know.

    Raises:
        IdempotencyKeyReusedError: the key belongs to another request.
        ArtifactExpiredError: it works on the artifact of an earlier job, which has been deleted.
    """
    at = now(session)
    job_id = new_id("job", at)
    check_uploads(session, owner, request)
    if idempotency is not None:
        earlier = find_replayed(session, request, owner=owner, key=idempotency.key)
        if earlier is not None:
            return Submission(job=earlier, created=False)
    if request.source_job_id is not None:
        source, export = request.source_job_id, request.source_export
        find_source(session, owner, source, export, lock=True, is_pushed=request.pushes)
    job = Job(
        id=job_id,
        owner=owner,
        request=request.model_dump(mode="json"),
        status=Status.QUEUED,
        created_at=at,
        available_at=at,
        max_attempts=max_attempts,
        work_key=secrets.token_hex(16),
        hub_token=hub_token,
        request_id=current_request_id(),
        queue=request.queue or default_queue,
        source_job_id=request.source_job_id,
        warnings=[*warnings],
    )
    session.add(job)
    session.flush()
    if idempotency is not None and not _remember(session, job, idempotency, request.fingerprint()):
        # Another request with this key has committed since the check above.
        session.delete(job)
        session.flush()
        return create_job(
            session,
            request,
            max_attempts=max_attempts,
            owner=owner,
            idempotency=idempotency,
            hub_token=hub_token,
            default_queue=default_queue,
            warnings=warnings,
        )
    enqueue_notification(session, job_id, at)
    append_event(session, job_id, NewEvent(type="status", message="queued", data={"status": Status.QUEUED}), at)
    if hub_token is not None:
        append_event(session, job_id, NewEvent(type=_TOKEN_EVENT, message="a Hub token came with the job"), at)
    return Submission(job=get_job(session, job_id, owner), created=True)


def find_replayed(session: Session, request: JobRequest, *, owner: str, key: str) -> Job | None:
    """Return the job that the same request created before under a key, if any.

    Raises:
        IdempotencyKeyReusedError: the key belongs to another request.
    """
    current = (IdempotencyKey.owner == owner, IdempotencyKey.key == key, IdempotencyKey.expires_at > now(session))
    row = session.scalars(select(IdempotencyKey).where(*current)).one_or_none()
    if row is None:
        return None
    if row.fingerprint not in {request.fingerprint(), request.earlier_fingerprint()}:
        raise IdempotencyKeyReusedError(
            "this Idempotency-Key was already used for a different request; use a new one", param="Idempotency-Key"
        )
    return get_job(session, row.job_id, owner)


def get_job(session: Session, job_id: str, owner: str = LOCAL_OWNER) -> Job:
    """Return a tenant's job, with its current state.

    Raises:
        JobNotFoundError: the job does not exist, or belongs to another tenant.
    """
    return _only(session, select(Job).where(Job.id == job_id, Job.owner == owner))


def list_jobs(
    session: Session,
    choice: JobFilter = ALL_JOBS,
    *,
    owner: str = LOCAL_OWNER,
    after: str | None = None,
    limit: int = 20,
) -> list[Job]:
    """Return the jobs of a tenant, newest first.

    Args:
        session: a transaction.
        choice: the filter.
        owner: the tenant.
        after: id of the last job already seen, which may have been deleted.
        limit: maximum number of jobs.
    """
    statement = select(Job).where(Job.owner == owner).order_by(Job.id.desc()).limit(limit)
    if after is not None:
        statement = statement.where(Job.id < after)
    if choice.status is not None:
        statement = statement.where(Job.status == choice.status)
    for key, value in choice.metadata:
        statement = statement.where(_has_label(session, key, value))
    return list(session.scalars(statement))


def count_active_jobs(session: Session, owner: str = LOCAL_OWNER) -> int:
    """Return the number of a tenant's jobs that have not ended."""
    active = [status for status in Status if not status.is_terminal]
    statement = select(func.count()).select_from(Job).where(Job.owner == owner, Job.status.in_(active))
    return session.execute(statement).scalar_one()


def count_jobs_before(session: Session, job: Job) -> int:
    """Return how many queued jobs of all tenants a worker takes before this one, which is queued."""
    before = (Job.status == Status.QUEUED, Job.queue == job.queue, Job.id < job.id)
    return session.execute(select(func.count()).select_from(Job).where(*before)).scalar_one()


def cancel_job(session: Session, job_id: str, owner: str = LOCAL_OWNER) -> Job:
    """Cancel a queued job at once, or ask the worker of a running one to stop; idempotent.

    Raises:
        JobNotFoundError: the job does not exist, or belongs to another tenant.
        ConflictError: it has succeeded or failed.
    """
    at = now(session)
    job = _locked(session, job_id, owner)
    if job.status in {Status.SUCCEEDED, Status.FAILED}:
        raise ConflictError(f"the job has {job.status} and can no longer be cancelled")
    target = Status.CANCELLED if job.status == Status.QUEUED else Status.CANCELLING
    if move(session, job_id, target, at=at):
        append_event(session, job_id, NewEvent(type="status", message=target, data={"status": target}), at)
    return get_job(session, job_id, owner)


def retry_job(
    session: Session, job_id: str, *, max_attempts: int, owner: str = LOCAL_OWNER, hub_token: str | None = None
) -> Submission:
    """Create a new job from a failed or cancelled one, which resumes from its checkpoints.

    A new one, because a terminal status never changes and a job never starts more than `max_attempts` times. Retrying
    again returns the same new job. The old job's Hub token was deleted when it ended: a retry that needs one must be
    given it again; an event tells if it is missing.

    Raises:
        JobNotFoundError: the job does not exist, or belongs to another tenant.
        ConflictError: it has succeeded, or has not ended.
    """
    old = _locked(session, job_id, owner)
    if old.status not in {Status.FAILED, Status.CANCELLED}:
        raise ConflictError(f"only a failed or cancelled job can be retried; this one is {old.status}")
    retried = session.scalars(select(Job).where(Job.retry_of == job_id)).one_or_none()
    if retried is not None:
        return Submission(job=retried, created=False)
    work_key, old.work_key = old.work_key, None
    session.flush()
    request = JobRequest.model_validate(old.request)
    # The queue of the old job, whatever the default is now.
    queue = cast("Queue", old.queue)
    job = create_job(
        session,
        request,
        max_attempts=max_attempts,
        owner=owner,
        hub_token=hub_token,
        default_queue=queue,
        warnings=old.warnings,
    ).job
    if hub_token is None and _had_token(session, job_id):
        append_event(session, job.id, _TOKEN_IS_GONE, now(session))
    job.retry_of = job_id
    if work_key is not None:
        # Checkpoints have one owner; without any, the new job starts from scratch.
        job.work_key = work_key
        _inherit_layers(session, job_id, job.id)
    session.flush()
    return Submission(job=job, created=True)


def delete_job(session: Session, job_id: str, owner: str = LOCAL_OWNER) -> Removed:
    """Delete a job that has ended, with all its rows.

    Returns:
        The files to remove once the transaction is committed; a sweep finds any that a crash leaves.

    Raises:
        JobNotFoundError: the job does not exist, or belongs to another tenant.
        ConflictError: it has not ended, or an unfinished job works on its result.
    """
    job = _locked(session, job_id, owner)
    if not Status(job.status).is_terminal:
        raise ConflictError(f"the job is {job.status}; cancel it before you delete it")
    if session.execute(select(is_in_use(job_id))).scalar_one():
        raise ConflictError("an unfinished job works on the result of this one; cancel that, or wait until it finishes")
    return _delete(session, job)


def delete_ended(session: Session, *, retention: timedelta, limit: int = 100) -> list[Removed]:
    """Delete jobs that ended longer ago than the retention time, with all their rows.

    Returns:
        The files to remove once the transaction is committed, one entry per job; empty once no jobs are left.
    """
    statement = (
        select(Job)
        .where(Job.finished_at <= now(session) - retention, ~is_in_use(Job.id))
        .order_by(Job.finished_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return [_delete(session, job) for job in session.scalars(statement).all()]


def enqueue_notification(session: Session, job_id: str, at: datetime) -> None:
    """Notify the workers of a job once this transaction is committed."""
    session.add(OutboxRow(job_id=job_id, created_at=at))
    session.flush()


def _had_token(session: Session, job_id: str) -> bool:
    """Return whether a Hub token came with a job, or with one that it retries."""
    events = select(JobEvent.sequence).where(JobEvent.job_id == job_id, JobEvent.type == _TOKEN_EVENT)
    return session.execute(events.limit(1)).first() is not None


def _inherit_layers(session: Session, old_id: str, new_id: str) -> None:
    """Copy the rows that match the checkpoints: a job that finds all its layers done publishes none again."""
    for rows in (LayerProfileRow, AllocationRow):
        names = [column.name for column in rows.__table__.columns if column.name != "job_id"]
        copied = select(literal(new_id), *(getattr(rows, name) for name in names)).where(rows.job_id == old_id)
        session.execute(insert(rows).from_select(["job_id", *names], copied))


def _has_label(session: Session, key: str, value: str) -> ColumnElement[bool]:
    # Key and value are bound parameters: in a JSON path, a key could contain quotes.
    if session.get_bind().dialect.name == "postgresql":
        return type_coerce(Job.request, postgresql.JSONB).contains({"metadata": {key: value}})
    label = func.json_each(Job.request, "$.metadata").table_valued("key", "value")
    return exists(select(1).select_from(label).where(label.c.key == key, label.c.value == value))


def _delete(session: Session, job: Job) -> Removed:
    keys = session.scalars(select(Artifact.storage_key).where(Artifact.job_id == job.id)).all()
    removed = Removed(storage_keys=tuple(key for key in keys if key is not None), work_key=job.work_key)
    session.execute(delete(Job).where(Job.id == job.id))
    session.expunge(job)
    return removed


def _locked(session: Session, job_id: str, owner: str) -> Job:
    # No other transaction changes the job before this one ends; on SQLite that holds for every writing transaction.
    return _only(session, select(Job).where(Job.id == job_id, Job.owner == owner).with_for_update())


def _only(session: Session, statement: Select[Job]) -> Job:
    job = session.scalars(statement.execution_options(populate_existing=True)).one_or_none()
    if job is None:
        raise JobNotFoundError("no job has this id; GET /jobs lists yours")
    return job


def _remember(session: Session, job: Job, idempotency: Idempotency, fingerprint: str) -> bool:
    mine = (IdempotencyKey.owner == job.owner, IdempotencyKey.key == idempotency.key)
    session.execute(delete(IdempotencyKey).where(*mine, IdempotencyKey.expires_at <= job.created_at))
    # On Postgres this waits for a transaction that is writing the same key, and then finds it taken.
    return insert_if_new(
        session,
        IdempotencyKey,
        owner=job.owner,
        key=idempotency.key,
        fingerprint=fingerprint,
        job_id=job.id,
        created_at=job.created_at,
        expires_at=job.created_at + idempotency.lifetime,
    )
