"""Evaluations of finished jobs: each is a job that refers to the one whose artifact it measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, ColumnElement, SQLColumnExpression, String, func, literal, or_, select, type_coerce
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.lifecycle import Status
from app.shared.models import EvaluationRow, Job, ReportRow
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


def list_evaluations(session: Session, source: Job, *, limit: int, answers: int) -> Sequence[Evaluation]:
    """Return the latest evaluations of a job's artifact, newest first.

    Args:
        session: a transaction.
        source: the job.
        limit: maximum number of evaluations.
        answers: maximum number of them, the newest, with answers to prompts.
    """
    statement = (
        select(Job, EvaluationRow.job_id, _without_answers(session, EvaluationRow.body))
        .outerjoin(EvaluationRow, EvaluationRow.job_id == Job.id)
        .where(Job.source_job_id == source.id, Job.request["on_source"].as_string() == "evaluation")
        .order_by(Job.id.desc())
        .limit(limit)
    )
    found: list[Evaluation] = []
    for job, measured, body in session.execute(statement):
        if measured is None:
            found.append(Evaluation(job=job, report=None))
        elif answers > 0:
            answers -= 1
            found.append(Evaluation(job=job, report=find_evaluation(session, job)))
        else:
            found.append(Evaluation(job=job, report=EvaluationReport.model_validate(body)))
    return found


def newest_evaluations(session: Session, job_ids: Sequence[str]) -> Mapping[str, EvaluationReport]:
    """Return the newest later evaluation of each of some jobs that has one, by job, without answers."""
    statement = (
        select(Job.source_job_id, _without_answers(session, EvaluationRow.body))
        .join(EvaluationRow, EvaluationRow.job_id == Job.id)
        .where(Job.source_job_id.in_(job_ids))
        .order_by(Job.id)
    )
    bodies = {source: body for source, body in session.execute(statement) if source is not None}
    return {source: EvaluationReport.model_validate(body) for source, body in bodies.items()}


def find_evaluation(session: Session, job: Job) -> EvaluationReport | None:
    """Return the result of a job that evaluates; None before it has one."""
    row = session.get(EvaluationRow, job.id)
    return None if row is None else EvaluationReport.model_validate(row.body)


def list_measured(session: Session, owner: str, model_id: str, *, limit: int) -> Sequence[tuple[Job, EvaluationReport]]:
    """Return a tenant's latest compressions of a model with each of their measurements, newest first, without answers.

    Args:
        session: a transaction.
        owner: the tenant.
        model_id: the model, as jobs name it.
        limit: maximum number of jobs, and of later evaluations.
    """
    of_model = (Job.owner == owner, Job.status == Status.SUCCEEDED, Job.request["model_id"].as_string() == model_id)
    # An export has the report of the job that it exports, which is listed itself.
    is_own = or_(Job.request["on_source"].as_string().is_(None), Job.request["on_source"].as_string() != "export")
    # Only a small part of the report, which has all layers.
    evaluation = _without_answers(session, ReportRow.body["evaluation"])
    within = select(Job, evaluation).join(ReportRow, ReportRow.job_id == Job.id).where(*of_model, is_own)
    own = [(job, body) for job, body in session.execute(within.order_by(Job.id.desc()).limit(limit))]
    compressed = {job.id: job for job, _ in own}
    later = (
        select(Job.source_job_id, _without_answers(session, EvaluationRow.body))
        .join(EvaluationRow, EvaluationRow.job_id == Job.id)
        .where(Job.source_job_id.in_(compressed))
        .order_by(Job.id.desc())
        .limit(limit)
    )
    found = [(compressed[source], body) for source, body in session.execute(later) if source is not None]
    measured = [*found, *((job, body) for job, body in own if body is not None)]
    return [(job, EvaluationReport.model_validate(body)) for job, body in measured]


def _without_answers(session: Session, body: SQLColumnExpression[Any]) -> ColumnElement[Any]:
    """Return a stored evaluation without the texts of the models, which are most of it; null if it is."""
    if session.get_bind().dialect.name == "sqlite":
        return type_coerce(func.json_remove(body, "$.answers"), JSON(none_as_null=True))
    # Nothing can be removed from the null of JSON.
    known = func.nullif(body, literal(JSON.NULL, JSONB), type_=JSONB)
    return known.op("-", return_type=JSONB())(literal("answers", String))
