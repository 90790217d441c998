"""Pushes of finished jobs to the Hub: each is a job that refers to the one whose artifact it pushes."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.models import Job, PushRow
from app.shared.outcomes import NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.leases import Lease, lock_leased_job
from rocket_core.report.push import PushReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """A push of a finished job.

    Attributes:
        job: the job that pushes.
        report: its result; None before it has one.
    """

    job: Job
    report: PushReport | None


def save_push(session: Session, lease: Lease, report: PushReport) -> bool:
    """Publish the result of a push.

    Returns:
        False if an earlier attempt has already published it; a published result never changes.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    if session.get(PushRow, job.id) is not None:
        return False
    at = now(session)
    session.add(PushRow(job_id=job.id, body=report.model_dump(mode="json"), created_at=at))
    session.flush()
    data = {"repository": report.repository, "url": report.url, "commit": report.commit}
    append_event(session, job.id, NewEvent(type="push", message=f"pushed to {report.url}", data=data), at)
    return True


def list_pushes(session: Session, source: Job, *, limit: int) -> Sequence[Push]:
    """Return the latest pushes of a job's artifact, newest first."""
    statement = (
        select(Job, PushRow)
        .outerjoin(PushRow, PushRow.job_id == Job.id)
        .where(Job.source_job_id == source.id, Job.request["on_source"].as_string() == "push")
        .order_by(Job.id.desc())
        .limit(limit)
    )
    return [_push(job, row) for job, row in session.execute(statement)]


def find_push(session: Session, job: Job) -> PushReport | None:
    """Return the result of a job that pushes; None before it has one."""
    return _push(job, session.get(PushRow, job.id)).report


def _push(job: Job, row: PushRow | None) -> Push:
    return Push(job=job, report=None if row is None else PushReport.model_validate(row.body))
