"""Quality that evaluations of finished jobs have measured."""

from collections.abc import Mapping, Sequence

from app.services.context import Context
from app.shared.models import Job
from app.shared.outcomes import JobResult
from app.shared.repositories import evaluations
from rocket_core.report.headlines import measured_quality
from rocket_core.report.quality import EvaluationReport


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
