"""Measured quality of all compressions of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.services.context import Context
from app.shared.models import Job
from app.shared.repositories import evaluations
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
