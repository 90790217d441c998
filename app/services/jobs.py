"""Submitting and controlling jobs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from pydantic import SecretStr

from app.services import quotas
from app.services.context import Context
from app.services.hub_tokens import choose_push_token
from app.services.uploads import check_dataset
from app.shared.encryption import encrypt
from app.shared.lifecycle import Status
from app.shared.models import Job, JobEvent
from app.shared.repositories import audit, events, jobs, outputs
from app.shared.repositories.audit import Action, Actor
from app.shared.repositories.jobs import Idempotency, JobFilter, Submission
from app.shared.requests import JobRequest
from rocket_core.report.healing import HealingPoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPage:
    """A page of a job's events, and the job as it was when they were read.

    Attributes:
        job: the job.
        events: the events in order.
        has_more: whether there are later ones.
    """

    job: Job
    events: Sequence[JobEvent]
    has_more: bool


def submit_job(
    context: Context,
    actor: Actor,
    request: JobRequest,
    idempotency_key: str | None,
    hub_token: SecretStr | None = None,
) -> Submission:
    """Accept a job, or return the one that an identical earlier request created.

    Args:
        context: the service.
        actor: who submits it.
        request: the job's request.
        idempotency_key: key under which the request may be repeated, even with another token.
        hub_token: the only token for the Hub, used now and by the job.

    Raises:
        RocketError: the request is invalid, or the Hub is unreachable.
        UploadTokenError: it pushes to the Hub, and a token for that is missing.
        UploadNotFoundError: the request names a calibration file that the tenant has not uploaded.
        IdempotencyKeyReusedError: the key belongs to another request.
        OverQuotaError: the request exceeds the tenant's limits.
        QuotaExceededError: the tenant's quota is used up.
    """
    owner = actor.tenant
    if request.pushes:
        hub_token = choose_push_token(context.settings, actor, hub_token)
    idempotency = None
    if idempotency_key is not None:
        lifetime = timedelta(hours=context.settings.idempotency_hours)
        idempotency = Idempotency(key=idempotency_key, lifetime=lifetime)
        with context.database.snapshot() as session:
            earlier = jobs.find_replayed(session, request, owner=owner, key=idempotency_key)
        # An accepted request is not judged again: the model's folder may be gone by now.
        if earlier is not None:
            return Submission(job=earlier, created=False)
    for dataset in request.datasets:
        check_dataset(context, owner, dataset)
    with context.database.snapshot() as session:
        limits = quotas.find_limits(session, context.settings, owner)
    warnings = context.admission.admit(owner, request, limits, hub_token)
    encrypted = _encrypted(context, request, hub_token)
    with context.database.transaction() as session:
        submission = jobs.create_job(
            session,
            request,
            max_attempts=context.settings.max_attempts,
            owner=owner,
            idempotency=idempotency,
            hub_token=encrypted,
            default_queue=context.settings.default_queue,
            warnings=warnings,
        )
        if submission.created:
            quotas.check_job_slot(session, context.settings, owner)
            audit.record(session, actor, Action.JOB_SUBMIT, subject=submission.job.id, detail={"kind": request.kind})
    if submission.created:
        _log.info("accepted", extra={"job_id": submission.job.id})
    context.on_queued()
    return submission


def get_job(context: Context, owner: str, job_id: str) -> Job:
    """Return a job.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return jobs.get_job(session, job_id, owner)


def list_jobs(
    context: Context, owner: str, choice: JobFilter, *, after: str | None, limit: int
) -> tuple[Sequence[Job], bool]:
    """Return a page of jobs, newest first, and whether there are more."""
    with context.database.snapshot() as session:
        page = jobs.list_jobs(session, choice, owner=owner, after=after, limit=limit + 1)
    return page[:limit], len(page) > limit


def list_events(context: Context, owner: str, job_id: str, *, after: int, limit: int) -> EventPage:
    """Return a page of a job's events in order.

    Args:
        context: the service.
        owner: the tenant.
        job_id: the job.
        after: number of the last event already seen.
        limit: maximum number of events.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        page = events.list_events(session, job.id, after=after, limit=limit + 1)
    return EventPage(job=job, events=page[:limit], has_more=len(page) > limit)


def list_healing_points(context: Context, owner: str, job_id: str) -> Sequence[HealingPoint]:
    """Return the loss curve of a job's healing so far; empty before the first point, or without any.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return outputs.list_healing_points(session, jobs.get_job(session, job_id, owner).id)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What the page of a job shows of it while it waits and runs.

    Attributes:
        job: the job.
        stages: events of the stages that it has entered, in order, however many other events it has.
        waiting_before: queued jobs that a worker takes before this one; 0 unless it is queued.
    """

    job: Job
    stages: Sequence[JobEvent]
    waiting_before: int


def get_state(context: Context, owner: str, job_id: str) -> JobState:
    """Return the state of a job.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        before = jobs.count_jobs_before(session, job) if job.status == Status.QUEUED else 0
        stages = events.list_typed_events(session, job.id, "stage")
        return JobState(job=job, stages=stages, waiting_before=before)


def cancel_job(context: Context, actor: Actor, job_id: str) -> Job:
    """Cancel a queued job, or ask the worker of a running one to stop.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ConflictError: it has succeeded or failed.
    """
    with context.database.transaction() as session:
        before = jobs.get_job(session, job_id, actor.tenant).status
        job = jobs.cancel_job(session, job_id, actor.tenant)
        # A repetition is a no-op, and must not fill the audit log.
        if job.status != before:
            audit.record(session, actor, Action.JOB_CANCEL, subject=job_id)
        return job


def retry_job(context: Context, actor: Actor, job_id: str, hub_token: SecretStr | None = None) -> Submission:
    """Create a new job that resumes from the checkpoints of a failed or cancelled one.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ConflictError: it has succeeded, or has not ended.
        UploadTokenError: it pushes to the Hub, and a token for that is missing.
        OverQuotaError: it exceeds the tenant's limits, which may have changed.
        QuotaExceededError: the tenant's quota is used up.
    """
    owner = actor.tenant
    with context.database.snapshot() as session:
        request = JobRequest.model_validate(jobs.get_job(session, job_id, owner).request)
    if request.pushes:
        hub_token = choose_push_token(context.settings, actor, hub_token)
    encrypted = _encrypted(context, request, hub_token)
    with context.database.transaction() as session:
        submission = jobs.retry_job(
            session, job_id, max_attempts=context.settings.max_attempts, owner=owner, hub_token=encrypted
        )
        if submission.created:
            limits = quotas.find_limits(session, context.settings, owner)
            quotas.check_evaluation_tokens(limits, request.evaluate)
            if request.reads_calibration:
                if request.options.calibrates:
                    quotas.check_calibration_tokens(limits, request.calibration)
                quotas.check_healing_tokens(limits, request.options.heal_tokens)
            quotas.check_job_slot(session, context.settings, owner)
            audit.record(session, actor, Action.JOB_RETRY, subject=submission.job.id, detail={"retry_of": job_id})
    if submission.created:
        _log.info("accepted", extra={"job_id": submission.job.id, "retry_of": job_id})
    context.on_queued()
    return submission


def _encrypted(context: Context, request: JobRequest, hub_token: SecretStr | None) -> str | None:
    # Secrets that the job does not use are not stored.
    if hub_token is None or not request.asks_the_hub:
        return None
    return encrypt(context.settings, hub_token)


def delete_job(context: Context, actor: Actor, job_id: str) -> None:
    """Delete a job that has ended, with its rows and files.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ConflictError: it has not ended.
    """
    with context.database.transaction() as session:
        removed = jobs.delete_job(session, job_id, actor.tenant)
        audit.record(session, actor, Action.JOB_DELETE, subject=job_id)
    context.remove(removed)
