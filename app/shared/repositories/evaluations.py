"""What evaluations have measured, of jobs and of all compressions of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import JSON, ColumnElement, SQLColumnExpression, String, func, literal, or_, select, type_coerce
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from app.shared.lifecycle import Status
from app.shared.models import EvaluationRow, Job, ReportRow
from app.shared.works import CONVERSIONS
from rocket_core.report.quality import EvaluationReport


def newest_evaluations(session: Session, job_ids: Sequence[str]) -> Mapping[str, EvaluationReport]:
    """Return the newest later evaluation of each of some jobs that has one, by job, without answers."""
    statement = (
        select(Job.source_job_id, without_answers(session, EvaluationRow.body))
        .join(EvaluationRow, EvaluationRow.job_id == Job.id)
        .where(Job.source_job_id.in_(job_ids))
        .order_by(Job.id)
    )
    bodies = {source: body for source, body in session.execute(statement) if source is not None}
    return {source: EvaluationReport.model_validate(body) for source, body in bodies.items()}


def list_measured(session: Session, owner: str, model_id: str, *, limit: int) -> Sequence[tuple[Job, EvaluationReport]]:
    """Return a tenant's latest compressions of a model with each of their measurements, newest first, without answers.

    Args:
        session: a transaction.
        owner: the tenant.
        model_id: the model, as jobs name it.
        limit: maximum number of jobs, and of later evaluations.
    """
    of_model = (Job.owner == owner, Job.status == Status.SUCCEEDED, Job.request["model_id"].as_string() == model_id)
    # The report of a conversion is that of the job that it converts, which is listed itself.
    kind = Job.request["on_source"].as_string()
    is_own = or_(kind.is_(None), kind.not_in(CONVERSIONS))
    # Only a small part of the report, which has all layers.
    evaluation = without_answers(session, ReportRow.body["evaluation"])
    within = select(Job, evaluation).join(ReportRow, ReportRow.job_id == Job.id).where(*of_model, is_own)
    own = [(job, body) for job, body in session.execute(within.order_by(Job.id.desc()).limit(limit))]
    compressed = {job.id: job for job, _ in own}
    later = (
        select(Job.source_job_id, without_answers(session, EvaluationRow.body))
        .join(EvaluationRow, EvaluationRow.job_id == Job.id)
        .where(Job.source_job_id.in_(compressed))
        .order_by(Job.id.desc())
        .limit(limit)
    )
    found = [(compressed[source], body) for source, body in session.execute(later) if source is not None]
    measured = [*found, *((job, body) for job, body in own if body is not None)]
    return [(job, EvaluationReport.model_validate(body)) for job, body in measured]


def without_answers(session: Session, body: SQLColumnExpression[Any]) -> ColumnElement[Any]:
    """Return a stored evaluation without the texts of the models, which are most of it; null if it is."""
    if session.get_bind().dialect.name == "sqlite":
        return type_coerce(func.json_remove(body, "$.answers"), JSON(none_as_null=True))
    # Nothing can be removed from the null of JSON.
    known = func.nullif(body, literal(JSON.NULL, JSONB), type_=JSONB)
    return known.op("-", return_type=JSONB())(literal("answers", String))
