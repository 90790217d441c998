"""What a job works on of its tenant's: uploads, and the artifact of an earlier job, kept as long as a job needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, SQLColumnExpression, exists, select
from sqlalchemy.orm import Session, aliased

from app.shared.database import now
from app.shared.errors import ArtifactExpiredError, ConflictError, JobNotFoundError
from app.shared.lifecycle import Status
from app.shared.models import Artifact, Job, ReportRow
from app.shared.repositories.models import check_model
from app.shared.repositories.uploads import check_upload
from app.shared.requests import UPLOAD, JobRequest
from app.shared.works import CONVERSIONS
from rocket_core.engines import ExportKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A job whose result another one can work on.

    Attributes:
        job: the job.
        report: its report, a `CompressionReport` as JSON.
    """

    job: Job
    report: dict[str, Any]

    @property
    def revision(self) -> str | None:
        """The revision of the model that it compressed; None if unknown."""
        revision = self.report.get("revision")
        return revision if isinstance(revision, str) else None


def check_uploads(session: Session, owner: str, request: JobRequest) -> None:
    """Check, while this transaction creates a job, that the texts and the model exist that its tenant has uploaded.

    Raises:
        UploadNotFoundError: a text does not exist, or belongs to another tenant.
        UploadedModelNotFoundError: the model does not, or does.
        ModelNotReadyError: parts of the model have not arrived.
    """
    for dataset in request.datasets:
        if dataset.startswith(UPLOAD):
            check_upload(session, owner, dataset.removeprefix(UPLOAD))
    if request.uploaded_model is not None and request.reads_model:
        check_model(session, owner, request.uploaded_model)


def find_source(
    session: Session, owner: str, job_id: str, kind: ExportKind, *, lock: bool = False, is_pushed: bool = False
) -> Source:
    """Return a job whose result another one can work on.

    Args:
        session: a transaction.
        owner: the tenant.
        job_id: the job.
        kind: the export that is needed of it.
        lock: whether to lock it, while this transaction creates the job that needs it.
        is_pushed: whether the files are needed as they are, which may be those of a job that has written an earlier
            result in another format.

    Raises:
        JobNotFoundError: the job does not exist, or belongs to another tenant.
        ConflictError: it has not succeeded, or has made no result.
        ArtifactExpiredError: the export has been deleted.
    """
    mine = select(Job).where(Job.id == job_id, Job.owner == owner)
    job = session.scalars(mine.with_for_update(read=True) if lock else mine).one_or_none()
    if job is None:
        raise JobNotFoundError("no job has this id; GET /jobs lists yours")
    if job.status != Status.SUCCEEDED:
        raise ConflictError(f"the job is {job.status}; only the result of a succeeded job can be used")
    report = session.get(ReportRow, job.id)
    if report is None:
        raise ConflictError("the job has no result; name one that has compressed or healed a model")
    if job.request.get("on_source") in CONVERSIONS and not is_pushed:
        raise ConflictError(
            "the job has only written the result of another one in another format; name the job that made the result"
        )
    if any(file.expires_at <= now(session) for file in list_source_files(session, owner, job_id, kind)):
        raise _expired(job_id)
    return Source(job=job, report=report.body)


def list_source_files(session: Session, owner: str, job_id: str, kind: ExportKind) -> Sequence[Artifact]:
    """Return the files of an export of a job, by name.

    Args:
        session: a transaction.
        owner: the tenant.
        job_id: the job.
        kind: the export.

    Raises:
        ArtifactExpiredError: they have been deleted, with the job or without it.
    """
    files = (
        select(Artifact)
        .join(Job, Job.id == Artifact.job_id)
        .where(Job.id == job_id, Job.owner == owner, Artifact.name.startswith(f"{kind}/", autoescape=True))
        .order_by(Artifact.name)
    )
    found = session.scalars(files).all()
    if not found or any(file.storage_key is None for file in found):
        raise _expired(job_id)
    return found


def is_in_use(job_id: SQLColumnExpression[str] | str) -> ColumnElement[bool]:
    """Return the condition that an unfinished job works on the result of a job.

    Args:
        job_id: the job whose result it is.
    """
    user = aliased(Job)
    active = [status for status in Status if not status.is_terminal]
    return exists(select(user.id).where(user.source_job_id == job_id, user.status.in_(active)))


def _expired(job_id: str) -> ArtifactExpiredError:
    return ArtifactExpiredError(
        f"the artifact of {job_id} was deleted, by its owner or at the end of its retention period; compress again"
    )
