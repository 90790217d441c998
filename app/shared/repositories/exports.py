"""Exports of finished jobs: each is a job that writes the artifact of another one in another format."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.shared.models import Job


def list_exports(session: Session, source: Job, *, limit: int) -> Sequence[Job]:
    """Return the latest jobs that write a job's artifact in other formats, newest first."""
    statement = (
        select(Job)
        .where(Job.source_job_id == source.id, Job.request["on_source"].as_string() == "export")
        .order_by(Job.id.desc())
        .limit(limit)
    )
    return session.scalars(statement).all()
