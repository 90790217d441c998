"""Work on the results of finished jobs: each is done by a job that refers to the one whose result it works on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.models import EvaluationRow, Job, PushRow
from app.shared.outcomes import NewEvent
from app.shared.repositories.evaluations import without_answers
from app.shared.repositories.events import append_event
from app.shared.repositories.leases import Lease, lock_leased_job
from app.shared.works import WorkKind
from rocket_core.report.push import PushReport
from rocket_core.report.quality import EvaluationReport

WorkReport = EvaluationReport | PushReport
"""The result of work that makes no files."""

# Each may have some megabytes.
_WITH_ANSWERS = 3
_ROWS: Mapping[str, type[EvaluationRow | PushRow]] = {"evaluation": EvaluationRow, "push": PushRow}
_REPORTS: Mapping[str, type[WorkReport]] = {"evaluation": EvaluationReport, "push": PushReport}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOnJob:
    """Work on the result of a job.

    Attributes:
        job: the job that does it.
        report: its result; None before it has one, and for work that makes files.
    """

    job: Job
    report: WorkReport | None


def save_report(session: Session, lease: Lease, report: WorkReport) -> bool:
    """Publish the result of work.

    Returns:
        False if an earlier attempt has already published it; a published result never changes.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    event = _event(report)
    rows = _ROWS[event.type]
    if session.get(rows, job.id) is not None:
        return False
    at = now(session)
    session.add(rows(job_id=job.id, body=report.model_dump(mode="json"), created_at=at))
    session.flush()
    append_event(session, job.id, event, at)
    return True


def find_report(session: Session, job: Job) -> WorkReport | None:
    """Return the result of a job's work; None before it has one, and for a job that makes files."""
    kind = str(job.request.get("on_source"))
    if kind not in _ROWS:
        return None
    rows = _ROWS[kind]
    body = session.scalars(select(rows.body).where(rows.job_id == job.id)).one_or_none()
    return None if body is None else _REPORTS[kind].model_validate(body)


def list_work(session: Session, source: Job, kind: WorkKind, *, limit: int) -> Sequence[WorkOnJob]:
    """Return the latest work of a kind on a job's result, newest first; only the newest evaluations with answers."""
    statement = (
        select(Job)
        .where(Job.source_job_id == source.id, Job.request["on_source"].as_string() == kind)
        .order_by(Job.id.desc())
        .limit(limit)
    )
    found = session.scalars(statement).all()
    reports = _find_reports(session, kind, [job.id for job in found])
    if kind == "evaluation":
        newest = [job for job in found if job.id in reports][:_WITH_ANSWERS]
        reports |= {job.id: find_report(session, job) for job in newest}
    return [WorkOnJob(job=job, report=reports.get(job.id)) for job in found]


def _find_reports(session: Session, kind: WorkKind, job_ids: Sequence[str]) -> dict[str, WorkReport | None]:
    """Return the results of those jobs that have one, evaluations without answers to prompts."""
    if kind not in _ROWS:
        return {}
    rows = _ROWS[kind]
    body = without_answers(session, rows.body) if kind == "evaluation" else rows.body
    statement = select(rows.job_id, body).where(rows.job_id.in_(job_ids))
    return {job_id: _REPORTS[kind].model_validate(stored) for job_id, stored in session.execute(statement)}


def _event(report: WorkReport) -> NewEvent:
    """Return the event of a result, whose type is the kind of work."""
    if isinstance(report, EvaluationReport):
        return NewEvent(type="evaluation", message="evaluated")
    data = {"repository": report.repository, "url": report.url, "commit": report.commit}
    return NewEvent(type="push", message=f"pushed to {report.url}", data=data)
