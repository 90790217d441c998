"""Figures about all jobs, for monitoring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.lifecycle import Status
from app.shared.metrics import AttemptRecord
from app.shared.models import Artifact, Job, JobEvent, OutboxRow, Upload
from app.shared.repositories.sweeps import LEASE_LOST

_ACTIVE = tuple(status for status in Status if not status.is_terminal)
# Upper bound on an attempt's stages, errors and status changes; layers are not counted.
_MAX_EVENTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """The state of the service at one moment.

    Attributes:
        active_jobs: jobs that have not ended, by queue and status; pairs without any are missing.
        waiting_seconds: by queue, how long the longest-waiting job could have been claimed.
        silent_seconds: by queue, the longest time since a held job's lease was renewed.
        unsent_notifications: number of rows in the outbox.
        artifact_bytes: size of all artifacts that have not expired.
        upload_bytes: size of all uploads.
    """

    active_jobs: Mapping[tuple[str, str], int]
    waiting_seconds: Mapping[str, float]
    silent_seconds: Mapping[str, float]
    unsent_notifications: int
    artifact_bytes: int
    upload_bytes: int


def read_statistics(session: Session, *, lease_seconds: float) -> Statistics:
    """Return counts and ages; ended jobs are not counted, so that the cost does not grow with the history.

    Args:
        session: a transaction.
        lease_seconds: duration of leases, from which the time of their renewal follows.
    """
    at = now(session)
    active = select(Job.queue, Job.status, func.count()).where(Job.status.in_(_ACTIVE)).group_by(Job.queue, Job.status)
    waiting = (
        select(Job.queue, func.min(Job.available_at))
        .where(Job.status == Status.QUEUED, Job.available_at <= at)
        .group_by(Job.queue)
    )
    held = select(Job.queue, func.min(Job.lease_until)).where(Job.fence.is_not(None)).group_by(Job.queue)
    artifacts = select(func.coalesce(func.sum(Artifact.size), 0)).where(Artifact.storage_key.is_not(None))
    uploads = select(func.coalesce(func.sum(Upload.size), 0))
    return Statistics(
        active_jobs={(queue, status): count for queue, status, count in session.execute(active)},
        waiting_seconds={queue: _age(at, since) for queue, since in session.execute(waiting)},
        silent_seconds={queue: max(0.0, lease_seconds + _age(at, until)) for queue, until in session.execute(held)},
        unsent_notifications=session.execute(select(func.count()).select_from(OutboxRow)).scalar_one(),
        artifact_bytes=int(session.execute(artifacts).scalar_one()),
        upload_bytes=int(session.execute(uploads).scalar_one()),
    )


def read_attempt(session: Session, job_id: str, *, after: int) -> AttemptRecord | None:
    """Return the record of an attempt, according to the job's events.

    Args:
        session: a transaction.
        job_id: the job.
        after: number of the job's last event when the attempt was claimed.

    Returns:
        The record; None if the attempt has not ended, or the job was deleted.
    """
    statement = (
        select(JobEvent)
        .where(JobEvent.job_id == job_id, JobEvent.sequence > after, JobEvent.type != "layer")
        .order_by(JobEvent.sequence)
        .limit(_MAX_EVENTS)
    )
    events = list(session.scalars(statement))
    # Later events belong to the next attempt, which another worker may have started already.
    ends = (
        number for number, event in enumerate(events) if event.type == "status" and event.message != Status.CANCELLING
    )
    end = next(ends, None)
    if end is None:
        return None
    outcome = _outcome(events[:end], Status(events[end].message))
    published = 0
    if outcome == Status.SUCCEEDED:
        sizes = select(func.coalesce(func.sum(Artifact.size), 0)).where(Artifact.job_id == job_id)
        published = int(session.execute(sizes).scalar_one())
    moments = [(event.message, event.created_at) for event in events[:end] if event.type == "stage"]
    if outcome == Status.SUCCEEDED:
        # Only then has the last stage finished, too.
        moments.append(("", events[end].created_at))
    return AttemptRecord(outcome=outcome, stages=_durations(moments), published_bytes=published)


def _outcome(before: Sequence[JobEvent], end: Status) -> str:
    if any(event.type == LEASE_LOST for event in before):
        return "lost"
    if end == Status.QUEUED and not any(event.type == "error" for event in before):
        return "released"
    return str(end)


def _durations(moments: Sequence[tuple[str, datetime]]) -> tuple[tuple[str, timedelta], ...]:
    return tuple((stage, max(timedelta(), until - since)) for (stage, since), (_, until) in pairwise(moments))


def _age(at: datetime, since: datetime | None) -> float:
    assert since is not None
    return (at - since).total_seconds()
