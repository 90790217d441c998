"""Quality that evaluations of finished jobs have measured, of jobs and of all compressions of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.services.context import Context
from app.shared.models import Job
from app.shared.outcomes import JobResult
from app.shared.repositories import evaluations
from rocket_core.report.headlines import measured_quality
from rocket_core.report.quality import EvaluationReport

_MOST = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The measured quality of a job's result.

    Attributes:
        job: the job that made it.
        stored_bytes: bytes of its weights.
        evaluation: the measurement, of the job itself or of a later one.
    """

    job: Job
    stored_bytes: int
    evaluation: EvaluationReport


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


def list_measurements(context: Context, owner: str, model_id: str) -> Sequence[Measurement]:
    """Return what the latest jobs of a model have measured, newest first; of each text only the latest of a job."""
    with context.database.snapshot() as session:
        found = evaluations.list_measured(session, owner, model_id, limit=_MOST)
    latest: dict[tuple[str, str], Measurement] = {}
    for job, report in found:
        assert job.result is not None
        measurement = Measurement(job=job, stored_bytes=job.result["stored_bytes"], evaluation=report)
        latest.setdefault((job.id, report.text_sha256), measurement)
    return list(latest.values())
