"""What a worker writes about its job, under its lease, and what the API reads of it."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from pydantic import JsonValue
from sqlalchemy import CursorResult, delete, insert, select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import ArtifactNotFoundError
from app.shared.lifecycle import Status
from app.shared.models import AllocationRow, Artifact, Job, LayerProfileRow, ReportRow
from app.shared.outcomes import JobResult, NewArtifact, NewEvent
from app.shared.repositories.events import append_event
from app.shared.repositories.leases import Lease, change, end_job, hold
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.report.schema import CompressionReport, StageReport, energy_text


def report_progress(
    session: Session, lease: Lease, *, stage: str, progress: float, finish_at: datetime | None = None
) -> None:
    """Says where the job is; a new stage is an event.

    Args:
        session: a writing transaction.
        lease: the worker's.
        stage: downloading, preflight, calibrating, allocating, factorizing, exporting or evaluating.
        progress: of the whole job, [0, 1]; a later attempt that has not caught up with an earlier one changes nothing.
        finish_at: when it should be done; None if that cannot be told.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    if job.stage != stage:
        append_event(session, job.id, NewEvent(type="stage", message=stage, data={"stage": stage}), now(session))
    change(
        session,
        lease,
        stage=stage,
        progress=min(1.0, max(job.progress, progress)),
        estimated_finish_at=finish_at,
        progressed_at=now(session),
    )


def add_event(session: Session, lease: Lease, event: NewEvent) -> int:
    """Tells of something that happened and returns its number.

    Raises:
        FencedOutError: the job was taken away.
    """
    return append_event(session, hold(session, lease).id, event, now(session))


def save_layer_profile(session: Session, lease: Lease, position: int, profile: LayerProfile) -> bool:
    """Publishes a layer's candidates.

    Args:
        session: a writing transaction.
        lease: the worker's.
        position: the layer's place in the model.
        profile: its candidates.

    Returns:
        False if an earlier attempt has published the layer already; what is published never changes.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    if session.get(LayerProfileRow, (job.id, profile.name)) is not None:
        return False
    at = now(session)
    row = profile.model_dump(mode="json")
    session.execute(insert(LayerProfileRow).values(job_id=job.id, position=position, created_at=at, **row))
    data = {"layer": profile.name, "candidates": len(profile.candidates)}
    append_event(session, job.id, NewEvent(type="layer", message=f"profiled {profile.name}", data=data), at)
    return True


def save_allocation(session: Session, lease: Lease, chosen: Sequence[tuple[str, Candidate]]) -> bool:
    """Publishes which candidate each layer got, all layers at once.

    Args:
        session: a writing transaction.
        lease: the worker's.
        chosen: layer names with their candidates, in the order of the model.

    Returns:
        False if an earlier attempt has published it already.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    if not chosen or session.scalars(select(AllocationRow).where(AllocationRow.job_id == job.id).limit(1)).first():
        return False
    at = now(session)
    rows = [
        {"job_id": job.id, "name": name, "position": position, "created_at": at, **candidate.model_dump()}
        for position, (name, candidate) in enumerate(chosen)
    ]
    session.execute(insert(AllocationRow), rows)
    data = {"layers": len(rows), "kept_parameters": sum(candidate.kept_parameters for _, candidate in chosen)}
    append_event(session, job.id, NewEvent(type="allocation", message="allocated", data=data), at)
    return True


def discard_layers(session: Session, lease: Lease, reason: NewEvent) -> None:
    """Takes back the layers and the allocation that a retry has inherited and cannot go on with.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    for rows in (LayerProfileRow, AllocationRow):
        session.execute(delete(rows).where(rows.job_id == job.id), execution_options={"synchronize_session": False})
    append_event(session, job.id, reason, now(session))


def discard_inherited_layers(session: Session, lease: Lease, reason: NewEvent) -> None:
    """Takes back the layers that a retry has copied from the job it repeats, if there are any; its own stay.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    discarded = 0
    for rows in (LayerProfileRow, AllocationRow):
        # A copy is as old as what it was copied from.
        statement = delete(rows).where(rows.job_id == job.id, rows.created_at < job.created_at)
        result = session.execute(statement, execution_options={"synchronize_session": False})
        assert isinstance(result, CursorResult)
        discarded += result.rowcount
    if discarded:
        append_event(session, job.id, reason, now(session))


def succeed_job(
    session: Session,
    lease: Lease,
    *,
    result: JobResult,
    report: CompressionReport,
    artifacts: Sequence[NewArtifact],
    retention: timedelta,
) -> Status:
    """Publishes report and artifacts and ends the job, all or nothing.

    Returns:
        `succeeded`, or `cancelled` if that had been asked for: nothing is published then, and the stored files are the
        caller's to remove.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    at = now(session)
    expires_at = at + retention
    if job.status == Status.RUNNING:
        session.execute(insert(ReportRow).values(job_id=job.id, body=report.model_dump(mode="json"), created_at=at))
        rows = [
            {"job_id": job.id, "created_at": at, "expires_at": expires_at, **artifact.model_dump()}
            for artifact in artifacts
        ]
        if rows:
            session.execute(insert(Artifact), rows)
    # The checkpoints have served; without a key their folder is swept.
    changes = {"result": result.model_dump(), "progress": 1.0, "work_key": None, "expires_at": expires_at}
    return end_job(session, job, Status.SUCCEEDED, at, **changes)


def save_costs(session: Session, lease: Lease, stages: Sequence[StageReport]) -> None:
    """Tells in an event what the stages of a job without a report have cost.

    Args:
        session: a writing transaction.
        lease: the worker's.
        stages: their costs, earlier attempts included: of several such events the last one counts.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    energy = energy_text(stages)
    took = f"took {sum(stage.seconds for stage in stages):.1f} s" + (f" and {energy}" if energy else "")
    data: dict[str, JsonValue] = {"stages": [stage.model_dump(mode="json") for stage in stages]}
    append_event(session, job.id, NewEvent(type="costs", message=took, data=data), now(session))


def succeed_profile(session: Session, lease: Lease) -> Status:
    """Ends a job that was to profile layers and no more, once its profile is saved.

    Returns:
        `succeeded`, or `cancelled` if that had been asked for.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = hold(session, lease)
    return end_job(session, job, Status.SUCCEEDED, now(session), progress=1.0, work_key=None)


def list_layer_profiles(session: Session, job_id: str) -> list[LayerProfile]:
    """Layers published so far, in the order of the model."""
    statement = select(LayerProfileRow).where(LayerProfileRow.job_id == job_id).order_by(LayerProfileRow.position)
    return [
        LayerProfile.model_validate({name: getattr(row, name) for name in LayerProfile.model_fields})
        for row in session.scalars(statement)
    ]


def list_allocation(session: Session, job_id: str) -> list[tuple[str, Candidate]]:
    """The candidate of each layer, in the order of the model; empty before the knapsack has run."""
    statement = select(AllocationRow).where(AllocationRow.job_id == job_id).order_by(AllocationRow.position)
    return [
        (row.name, Candidate.model_validate({name: getattr(row, name) for name in Candidate.model_fields}))
        for row in session.scalars(statement)
    ]


def find_report(session: Session, job: Job) -> ReportRow | None:
    """The report; None unless the job has succeeded."""
    return session.get(ReportRow, job.id)


def list_artifacts(session: Session, job: Job) -> list[Artifact]:
    """Artifacts by name, expired ones too."""
    return list(session.scalars(select(Artifact).where(Artifact.job_id == job.id).order_by(Artifact.name)))


def find_artifact(session: Session, job: Job, name: str) -> Artifact:
    """One artifact, expired or not.

    Raises:
        ArtifactNotFoundError: the job has none of that name.
    """
    # Postgres takes neither NUL nor lone surrogates, which a client's name may hold.
    artifact = session.get(Artifact, (job.id, name)) if name.isprintable() else None
    if artifact is None:
        raise ArtifactNotFoundError("the job has no artifact of this name; GET /jobs/{id}/artifacts lists them")
    return artifact
