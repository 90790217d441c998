"""Work on the results of finished jobs: what is accepted, and what became of it."""

from collections.abc import Sequence
from typing import cast

from huggingface_hub import constants
from sqlalchemy.orm import Session

from app.services.artifact_settings import find_settings, read_settings
from app.services.context import Context
from app.services.exports import check_export
from app.shared.errors import InvalidRequestError
from app.shared.models import Artifact, Job
from app.shared.repositories import jobs, outputs, sources, works
from app.shared.repositories.sources import Source
from app.shared.repositories.works import WorkOnJob, WorkReport
from app.shared.requests import (
    SOURCE_EXPORT,
    EvaluationRequest,
    ExportRequest,
    HealingRequest,
    JobRequest,
    PushRequest,
    Queue,
    WorkRequest,
)
from app.shared.works import WORKS, WorkKind
from rocket_core.engines import PUSHED_FIRST, ExportKind
from rocket_core.errors import HubUnavailableError, UnsupportedExportError
from rocket_core.inspection.checks.prompts import check_prompts, check_tasks

_MOST = 100


def job_request(context: Context, owner: str, job_id: str, body: WorkRequest) -> JobRequest:
    """Return the request of a job that works on the result of another one.

    Raises:
        JobNotFoundError: the other job does not exist, or is not the tenant's.
        ConflictError: it has not succeeded, has made no result, or has already exported the format.
        ArtifactExpiredError: its files have been deleted, or it has exported none that can be worked on.
        InvalidRequestError: it has not made the export that is needed.
        UnsupportedExportError: the same, or the format cannot hold exactly what the artifact stores.
        UnsupportedArchitectureError: the engine that reads the format does not run models of this class.
        InvalidConfigError: the model answers no prompts, or not at this length; or the engine does not run it.
        HubUnavailableError: the service works offline, and cannot push.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        original = JobRequest.model_validate(job.request)
        export = _needed_export(body, original, _list_made(session, job))
        source = sources.find_source(session, owner, job_id, export, is_pushed=WORKS[body.kind].pushes)
        config = find_settings(session, job, export)
    _check(context, body, source, config)
    if isinstance(body, PushRequest):
        body = body.model_copy(update={"export": export})
    revision = source.revision if original.is_on_hub else None
    return body.job_request(job_id, original, revision, queue=cast("Queue", job.queue))


def list_work(context: Context, owner: str, job_id: str, kind: WorkKind) -> Sequence[WorkOnJob]:
    """Return the latest work of a kind on a job's result, newest first.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return works.list_work(session, jobs.get_job(session, job_id, owner), kind, limit=_MOST)


def find_report(context: Context, owner: str, job_id: str) -> WorkReport | None:
    """Return the result of a job's work; None before it has one, and for a job that makes files.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return works.find_report(session, jobs.get_job(session, job_id, owner))


def list_made(context: Context, owner: str, job_id: str) -> Sequence[ExportKind]:
    """Return the exports that a job has made, the one that is pushed without a choice first.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return _list_made(session, jobs.get_job(session, job_id, owner))


def _list_made(session: Session, job: Job) -> Sequence[ExportKind]:
    folders = {file.name.partition("/")[0] for file in outputs.list_artifacts(session, job)}
    return [kind for kind in PUSHED_FIRST if kind in folders]


def _needed_export(body: WorkRequest, original: JobRequest, made: Sequence[ExportKind]) -> ExportKind:
    """Return the export of a job that work on its result needs; raise an error if it has made others only."""
    exported = original.options.export
    lacks_source = original.kind in {"compression", "healing"} and SOURCE_EXPORT not in exported
    reason = f"the job exported {', '.join(exported)}, and only the export {SOURCE_EXPORT} can be"
    match body:
        case EvaluationRequest():
            return original.compression_config().evaluated_export
        case PushRequest():
            first: ExportKind = next(iter(made), PUSHED_FIRST[0])
            chosen = body.export or first
            if made and chosen not in made:
                raise InvalidRequestError(f"the job has no export {chosen}; it has {', '.join(made)}", param="export")
            return chosen
        case HealingRequest() if lacks_source:
            raise InvalidRequestError(
                f"{reason} healed; compress again with that export, or with the option heal_tokens"
            )
        case ExportRequest() if lacks_source:
            raise UnsupportedExportError(f"{reason} written in other formats; compress again with the export {body.to}")
    return SOURCE_EXPORT


def _check(context: Context, body: WorkRequest, source: Source, config: Artifact | None) -> None:
    """Raise an error if this work is known to be impossible, for a reason that other kinds of work do not have."""
    match body:
        case EvaluationRequest():
            settings, model = read_settings(context, config), source.job.request["model_id"]
            check_prompts(settings, body.prompts, body.answer_tokens, model)
            check_tasks(settings, body.tasks, model)
        case ExportRequest():
            check_export(context, body.to, source, config)
        case PushRequest() if constants.HF_HUB_OFFLINE:
            raise HubUnavailableError(
                "this server works offline (HF_HUB_OFFLINE) and cannot push to the Hub; download the files, and push "
                "them from a machine that reaches it"
            )
