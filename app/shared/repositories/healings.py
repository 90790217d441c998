"""Jobs whose results others heal: their artifacts are kept as long as a job needs them."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, SQLColumnExpression, exists, select
from sqlalchemy.orm import Session, aliased

from app.shared.database import now
from app.shared.errors import ArtifactExpiredError, ConflictError, JobNotFoundError
from app.shared.lifecycle import Status
from app.shared.models import Artifact, Job, ReportRow
from app.shared.requests import HEALED_EXPORT


@dataclass(frozen=True, kw_only=True, slots=True)
class Healed:
    """A job whose result can be healed.

    Attributes:
        job: the job.
        revision: the revision of the model that it compressed, as in its report; None if unknown.
    """

    job: Job
    revision: str | None


def find_healed(session: Session, owner: str, job_id: str, *, lock: bool = False) -> Healed:
    """Return a job whose result can be healed.

    Args:
        session: a transaction.
        owner: the tenant.
        job_id: the job.
        lock: whether to lock it, while this transaction creates the job that needs it.

    Raises:
        JobNotFoundError: the job does not exist, or belongs to another tenant.
        ConflictError: it has not succeeded, or has no artifact to heal.
        ArtifactExpiredError: the artifact has been deleted.
    """
    mine = select(Job).where(Job.id == job_id, Job.owner == owner)
    job = session.scalars(mine.with_for_update(read=True) if lock else mine).one_or_none()
    if job is None:
        raise JobNotFoundError("no job has this id; GET /jobs lists yours")
    if job.status != Status.SUCCEEDED:
        raise ConflictError(f"the job is {job.status}; only the result of a succeeded job can be healed")
    report = session.get(ReportRow, job.id)
    if report is None:
        raise ConflictError("the job has profiled a model and has no result; heal one that has compressed a model")
    if any(file.expires_at <= now(session) for file in find_healed_files(session, owner, job_id)):
        raise _expired(job_id)
    revision = report.body.get("revision")
    return Healed(job=job, revision=revision if isinstance(revision, str) else None)


def find_healed_files(session: Session, owner: str, job_id: str) -> Sequence[Artifact]:
    """Return the files of the artifact of a job that are healed.

    Args:
        session: a transaction.
        owner: the tenant.
        job_id: the job.

    Raises:
        ArtifactExpiredError: they have been deleted, with the job or without it.
    """
    files = (
        select(Artifact)
        .join(Job, Job.id == Artifact.job_id)
        .where(Job.id == job_id, Job.owner == owner, Artifact.name.startswith(f"{HEALED_EXPORT}/", autoescape=True))
        .order_by(Artifact.name)
    )
    found = session.scalars(files).all()
    if not found or any(file.storage_key is None for file in found):
        raise _expired(job_id)
    return found


def is_being_healed(job_id: SQLColumnExpression[str] | str) -> ColumnElement[bool]:
    """Return the condition that an unfinished job heals the result of a job.

    Args:
        job_id: the job whose result it is.
    """
    healer = aliased(Job)
    active = [status for status in Status if not status.is_terminal]
    return exists(select(healer.id).where(healer.status.in_(active), healer.request["heals"].as_string() == job_id))


def _expired(job_id: str) -> ArtifactExpiredError:
    return ArtifactExpiredError(
        f"the artifact of {job_id} was deleted, by its owner or at the end of its retention period; compress again"
    )
