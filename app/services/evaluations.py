"""Evaluations of finished jobs."""

from collections.abc import Sequence

from app.services.context import Context
from app.shared.errors import ArtifactExpiredError, ConflictError
from app.shared.models import Job
from app.shared.repositories import evaluations, jobs, outputs
from app.shared.repositories.evaluations import Evaluation
from app.shared.requests import LOCAL, EvaluationRequest, JobRequest
from rocket_core.report.quality import EvaluationReport

_MOST = 100


def evaluation_request(context: Context, owner: str, job_id: str, evaluation: EvaluationRequest) -> JobRequest:
    """Return the request of the job that evaluates the artifact of another one.

    Args:
        context: the service.
        owner: the tenant.
        job_id: the job whose artifact is measured.
        evaluation: how.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ConflictError: it has no artifact to evaluate.
        ArtifactExpiredError: its artifacts were deleted.
    """
    with context.database.snapshot() as session:
        source = jobs.get_job(session, job_id, owner)
        report = outputs.find_report(session, source)
        artifacts = outputs.list_artifacts(session, source)
    request = JobRequest.model_validate(source.request)
    if report is None:
        raise ConflictError(f"{_state(request, source)}; only the result of a compression can be evaluated")
    if any(artifact.storage_key is None for artifact in artifacts):
        raise ArtifactExpiredError("the artifacts were deleted at the end of their retention period; run the job again")
    changes: dict[str, object] = {
        "source_job_id": source.id,
        "evaluate": evaluation.model_dump(mode="json"),
        "benchmark": False,
        "metadata": {},
        "queue": source.queue,
    }
    if not request.model_id.startswith(LOCAL):
        # The commit that was compressed: a branch may have moved since.
        changes["revision"] = report.body["revision"]
    return JobRequest.model_validate(source.request | changes)


def list_evaluations(context: Context, owner: str, job_id: str) -> Sequence[Evaluation]:
    """Return the latest evaluations of a job's artifact, newest first.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return evaluations.list_evaluations(session, jobs.get_job(session, job_id, owner), limit=_MOST)


def find_evaluation(context: Context, owner: str, job_id: str) -> EvaluationReport | None:
    """Return the result of a job that evaluates; None before it has one, and for other jobs.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return evaluations.find_evaluation(session, jobs.get_job(session, job_id, owner))


def _state(request: JobRequest, job: Job) -> str:
    return f"the job is {job.status}" if request.kind == "compression" else f"the job is of kind {request.kind}"
