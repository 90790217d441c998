"""Evaluations of finished jobs: each is a job that refers to the one whose artifact it measures."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.models import EvaluationRow, Job
from app.shared.outcomes import NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.leases import Lease, lock_leased_job
from rocket_core.report.quality import EvaluationReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation of a finished job.

    Attributes:
        job: the job that evaluates.
        report: its result; None before it has one.
    """

    job: Job
    report: EvaluationReport | None


def save_evaluation(session: Session, lease: Lease, report: EvaluationReport) -> bool:
    """Publish the result of an evaluation.

    Returns:
        False if an earlier attempt has already published it; a published result never changes.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    if session.get(EvaluationRow, job.id) is not None:
        return False
    at = now(session)
    session.add(EvaluationRow(job_id=job.id, body=report.model_dump(mode="json"), created_at=at))
    session.flush()
    append_event(session, job.id, NewEvent(type="evaluation", message="evaluated"), at)
    return True


def list_evaluations(session: Session, source: Job, *, limit: int) -> Sequence[Evaluation]:
    """Return the latest evaluations of a job's artifact, newest first."""
    statement = (
        select(Job, EvaluationRow)
        .outerjoin(EvaluationRow, EvaluationRow.job_id == Job.id)
        .where(Job.source_job_id == source.id)
        .order_by(Job.id.desc())
        .limit(limit)
    )
    return [_evaluation(job, row) for job, row in session.execute(statement)]


def find_evaluation(session: Session, job: Job) -> EvaluationReport | None:
    """Return the result of a job that evaluates; None before it has one."""
    return _evaluation(job, session.get(EvaluationRow, job.id)).report


def _evaluation(job: Job, row: EvaluationRow | None) -> Evaluation:
    return Evaluation(job=job, report=None if row is None else EvaluationReport.model_validate(row.body))
