"""Evaluations of finished jobs."""

from collections.abc import Mapping, Sequence

from app.services.artifact_settings import find_settings, read_settings
from app.services.context import Context
from app.shared.models import Job
from app.shared.outcomes import JobResult
from app.shared.repositories import evaluations, jobs, sources
from app.shared.repositories.evaluations import Evaluation
from app.shared.requests import EvaluationRequest, JobRequest
from rocket_core.inspection.checks.prompts import check_prompts
from rocket_core.report.headlines import measured_quality
from rocket_core.report.quality import EvaluationReport

_MOST = 100
# Each may have some megabytes.
_WITH_ANSWERS = 3


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
        InvalidConfigError: the model answers no prompts, or not at this length.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        request = JobRequest.model_validate(job.request)
        export = request.compression_config().evaluated_export
        source = sources.find_source(session, owner, job_id, export)
        config = find_settings(session, job, export)
    check_prompts(read_settings(context, config), evaluation.prompts, evaluation.answer_tokens, request.model_id)
    changes: dict[str, object] = {
        "source_job_id": job.id,
        "on_source": "evaluation",
        "evaluate": evaluation.model_dump(mode="json"),
        "benchmark": False,
        "metadata": {},
        "queue": job.queue,
    }
    if request.is_on_hub:
        # The commit that was compressed: a branch may have moved since.
        changes["revision"] = source.revision
    return JobRequest.model_validate(job.request | changes)


def list_evaluations(context: Context, owner: str, job_id: str) -> Sequence[Evaluation]:
    """Return the latest evaluations of a job's artifact, newest first; only the first few with answers to prompts.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        return evaluations.list_evaluations(session, job, limit=_MOST, answers=_WITH_ANSWERS)


def read_results(context: Context, found: Sequence[Job]) -> Mapping[str, JobResult]:
    """Return the results of those of a tenant's jobs that have one, by job.

    A quality that was only predicted is replaced by the one that the newest later evaluation has measured.
    """
    results = {job.id: JobResult.model_validate(job.result) for job in found if job.result is not None}
    predicted = [job_id for job_id, result in results.items() if not result.quality_is_measured]
    later = newest_evaluations(context, predicted) if predicted else {}
    measured = {
        job_id: results[job_id].model_copy(
            update={"quality": measured_quality(report).value, "quality_is_measured": True}
        )
        for job_id, report in later.items()
    }
    return results | measured


def newest_evaluations(context: Context, job_ids: Sequence[str]) -> Mapping[str, EvaluationReport]:
    """Return the newest later evaluation of each of a tenant's jobs that has one, by job, without answers."""
    with context.database.snapshot() as session:
        return evaluations.newest_evaluations(session, job_ids)


def find_evaluation(context: Context, owner: str, job_id: str) -> EvaluationReport | None:
    """Return the result of a job that evaluates; None before it has one, and for other jobs.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return evaluations.find_evaluation(session, jobs.get_job(session, job_id, owner))
