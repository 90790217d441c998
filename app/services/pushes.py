"""Pushes of finished jobs to the Hub: what is accepted, and what became of them."""

from collections.abc import Sequence

from huggingface_hub import constants
from sqlalchemy.orm import Session

from app.services.context import Context
from app.shared.errors import InvalidRequestError
from app.shared.models import Job
from app.shared.repositories import jobs, outputs, pushes, sources
from app.shared.repositories.pushes import Push
from app.shared.requests import JobRequest, PushRequest
from rocket_core.engines import PUSHED_FIRST, ExportKind
from rocket_core.errors import HubUnavailableError
from rocket_core.report.push import PushReport

_MOST = 100


def push_request(context: Context, owner: str, job_id: str, request: PushRequest) -> JobRequest:
    """Return the request of a job that pushes an export of another one.

    Raises:
        JobNotFoundError: the other job does not exist, or is not the tenant's.
        ConflictError: it has not succeeded, or has no files.
        InvalidRequestError: it has not made this export.
        ArtifactExpiredError: its files have been deleted.
        HubUnavailableError: the service works offline.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        exports = _list_exports(session, job)
        first: ExportKind = next(iter(exports), PUSHED_FIRST[0])
        chosen = first if request.export is None else request.export
        if exports and chosen not in exports:
            raise InvalidRequestError(f"the job has no export {chosen}; it has {', '.join(exports)}", param="export")
        source = sources.find_source(session, owner, job_id, chosen, is_pushed=True)
    if constants.HF_HUB_OFFLINE:
        raise HubUnavailableError(
            "this server works offline (HF_HUB_OFFLINE) and cannot push to the Hub; download the files, and push them "
            "from a machine that reaches it"
        )
    original = JobRequest.model_validate(job.request)
    return request.job_request(job_id, original, chosen, source.revision if original.is_on_hub else None)


def list_exports(context: Context, owner: str, job_id: str) -> Sequence[ExportKind]:
    """Return the exports of a job that can be pushed, the one that is pushed without a choice first.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return _list_exports(session, jobs.get_job(session, job_id, owner))


def list_pushes(context: Context, owner: str, job_id: str) -> Sequence[Push]:
    """Return the latest pushes of a job's artifact, newest first.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return pushes.list_pushes(session, jobs.get_job(session, job_id, owner), limit=_MOST)


def find_push(context: Context, owner: str, job_id: str) -> PushReport | None:
    """Return the result of a job that pushes; None before it has one, and for other jobs.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return pushes.find_push(session, jobs.get_job(session, job_id, owner))


def _list_exports(session: Session, job: Job) -> Sequence[ExportKind]:
    folders = {file.name.partition("/")[0] for file in outputs.list_artifacts(session, job)}
    return [kind for kind in PUSHED_FIRST if kind in folders]
