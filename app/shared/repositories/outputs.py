"""Results of a job: written by its worker under a lease, and read by the API."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from pydantic import JsonValue
from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from app.shared.database import change_rows, now
from app.shared.errors import ArtifactNotFoundError
from app.shared.lifecycle import Status
from app.shared.models import AllocationRow, Artifact, Job, LayerProfileRow, ReportRow
from app.shared.outcomes import JobResult, NewArtifact, NewEvent
from app.shared.repositories.events import append_event, find_last_event, list_typed_events
from app.shared.repositories.leases import Lease, change, end_job, lock_leased_job
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import STAGES, Stage
from rocket_core.engines import current_name
from rocket_core.report.healing import HealingPoint
from rocket_core.report.layer_places import LayerShape
from rocket_core.report.schema import CompressionReport, StageReport, energy_text

_COMPRESSING: Stage = "factorizing"
HEALING_EVENT = "healing"
"""Type of the event for a point of the loss curve of healing."""


def report_progress(
    session: Session,
    lease: Lease,
    *,
    stage: str,
    progress: float,
    finish_at: datetime | None = None,
    layer: str | None = None,
) -> None:
    """Record the job's progress; a new stage is an event.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        stage: one of `rocket_core.config.STAGES`.
        progress: of the whole job, [0, 1]; it never decreases while a later attempt catches up with an earlier one.
        finish_at: estimated end; None if unknown.
        layer: the layer that the stage works on; None if none.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    if job.stage != stage:
        append_event(session, job.id, NewEvent(type="stage", message=stage, data={"stage": stage}), now(session))
    change(
        session,
        lease,
        stage=stage,
        progress=min(1.0, max(job.progress, progress)),
        estimated_finish_at=finish_at,
        progressed_at=now(session),
        compressed_layers=max(job.compressed_layers, _count_compressed(session, job, stage, layer)),
    )


def _count_compressed(session: Session, job: Job, stage: str, layer: str | None) -> int:
    """Return how many layers, in the order of the model, are compressed once a stage works on a layer."""
    if stage == _COMPRESSING and layer is not None:
        row = session.get(LayerProfileRow, (job.id, layer))
        return 0 if row is None else row.position
    if stage in STAGES and STAGES.index(stage) > STAGES.index(_COMPRESSING):
        return count_layers(session, job.id)[0]
    return 0


def save_layer_profile(session: Session, lease: Lease, position: int, profile: LayerProfile) -> bool:
    """Publish a layer's candidates.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        position: index of the layer in the model.
        profile: its candidates.

    Returns:
        False if an earlier attempt has already published the layer; published layers never change.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    if session.get(LayerProfileRow, (job.id, profile.name)) is not None:
        return False
    at = now(session)
    row = profile.model_dump(mode="json")
    session.execute(insert(LayerProfileRow).values(job_id=job.id, position=position, created_at=at, **row))
    data = {"layer": profile.name, "candidates": len(profile.candidates)}
    append_event(session, job.id, NewEvent(type="layer", message=f"profiled {profile.name}", data=data), at)
    return True


def save_allocation(session: Session, lease: Lease, chosen: Sequence[tuple[str, Candidate]]) -> bool:
    """Publish the chosen candidates, of all layers at once.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        chosen: layer names with their candidates, in the order of the model.

    Returns:
        False if an earlier attempt has already published them.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
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


def save_healing_point(session: Session, lease: Lease, point: HealingPoint) -> bool:
    """Publish a point of the loss curve of healing, as an event.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        point: the point; points come in the order of the curve.

    Returns:
        False if an earlier attempt has already published the point; published points never change.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    last = find_last_event(session, job.id, HEALING_EVENT)
    if last is not None and point.order <= HealingPoint.model_validate(last.data).order:
        return False
    event = NewEvent(type=HEALING_EVENT, message=f"healing: {point.text}", data=point.model_dump(mode="json"))
    append_event(session, job.id, event, now(session))
    return True


def list_healing_points(session: Session, job_id: str) -> list[HealingPoint]:
    """Return the loss curve published so far."""
    return [HealingPoint.model_validate(event.data) for event in list_typed_events(session, job_id, HEALING_EVENT)]


def discard_layers(session: Session, lease: Lease, reason: NewEvent) -> None:
    """Discard the layers and the allocation that a retry has inherited and cannot resume from.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    for rows in (LayerProfileRow, AllocationRow):
        session.execute(delete(rows).where(rows.job_id == job.id))
    change(session, lease, compressed_layers=0)
    append_event(session, job.id, reason, now(session))


def discard_inherited_layers(session: Session, lease: Lease, reason: NewEvent) -> None:
    """Discard the layers that a retry has copied from the job it repeats, if any; its own remain.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    discarded = 0
    for rows in (LayerProfileRow, AllocationRow):
        # A copy keeps the creation time of the original.
        copied = delete(rows).where(rows.job_id == job.id, rows.created_at < job.created_at)
        discarded += change_rows(session, copied)
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
    """Publish report and artifacts and end the job, atomically.

    Returns:
        `succeeded`, or `cancelled` if that was requested: then nothing is published, and the caller must remove the
        stored files.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
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
    # The checkpoints are no longer needed; without a key their folder is swept.
    changes = {"result": result.model_dump(), "progress": 1.0, "work_key": None, "expires_at": expires_at}
    return end_job(session, job, Status.SUCCEEDED, at, **changes)


def save_costs(session: Session, lease: Lease, stages: Sequence[StageReport]) -> None:
    """Record in an event what the stages of a job without a report have cost.

    Args:
        session: a writing transaction.
        lease: the worker's lease.
        stages: their costs, including earlier attempts: the last of several such events counts.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    energy = energy_text(stages)
    took = f"took {sum(stage.seconds for stage in stages):.1f} s" + (f" and {energy}" if energy else "")
    data: dict[str, JsonValue] = {"stages": [stage.model_dump(mode="json") for stage in stages]}
    append_event(session, job.id, NewEvent(type="costs", message=took, data=data), now(session))


def succeed_without_files(session: Session, lease: Lease) -> Status:
    """End a job that publishes no files, once its profile or its evaluation is saved.

    Returns:
        `succeeded`, or `cancelled` if that was requested.

    Raises:
        FencedOutError: the job was taken away.
    """
    job = lock_leased_job(session, lease)
    return end_job(session, job, Status.SUCCEEDED, now(session), progress=1.0, work_key=None)


def list_layer_profiles(session: Session, job_id: str) -> list[LayerProfile]:
    """Return the layers published so far, in the order of the model."""
    statement = select(LayerProfileRow).where(LayerProfileRow.job_id == job_id).order_by(LayerProfileRow.position)
    return [
        LayerProfile.model_validate({name: getattr(row, name) for name in LayerProfile.model_fields})
        for row in session.scalars(statement)
    ]


def count_layers(session: Session, job_id: str) -> tuple[int, int]:
    """Return how many layers are profiled, and how many of them have a candidate chosen."""
    profiled, chosen = (
        session.execute(select(func.count()).select_from(rows).where(rows.job_id == job_id)).scalar_one()
        for rows in (LayerProfileRow, AllocationRow)
    )
    return profiled, chosen


def list_layer_shapes(session: Session, job_id: str) -> list[LayerShape]:
    """Return name and shape of the layers profiled so far, in the order of the model, without their candidates."""
    row = LayerProfileRow
    statement = select(row.name, row.d_in, row.d_out, row.routed_tokens).where(row.job_id == job_id)
    return [
        LayerShape(name=name, d_in=d_in, d_out=d_out, routed_tokens=routed_tokens)
        for name, d_in, d_out, routed_tokens in session.execute(statement.order_by(row.position))
    ]


def list_allocation(session: Session, job_id: str) -> list[tuple[str, Candidate]]:
    """Return the candidate of each layer, in the order of the model; empty before the knapsack has run."""
    statement = select(AllocationRow).where(AllocationRow.job_id == job_id).order_by(AllocationRow.position)
    return [
        (row.name, Candidate.model_validate({name: getattr(row, name) for name in Candidate.model_fields}))
        for row in session.scalars(statement)
    ]


def find_report(session: Session, job: Job) -> ReportRow | None:
    """Return the report; None unless the job has succeeded."""
    return session.get(ReportRow, job.id)


def list_artifacts(session: Session, job: Job) -> list[Artifact]:
    """Return the artifacts by name, including expired ones."""
    return list(session.scalars(select(Artifact).where(Artifact.job_id == job.id).order_by(Artifact.name)))


def find_artifact(session: Session, job: Job, name: str) -> Artifact:
    """Return an artifact, expired or not.

    Raises:
        ArtifactNotFoundError: the job has no artifact of that name.
    """
    name = str(current_name(name))
    # Postgres rejects NUL and lone surrogates, which a client's name may contain.
    artifact = session.get(Artifact, (job.id, name)) if name.isprintable() else None
    if artifact is None:
        raise ArtifactNotFoundError("the job has no artifact with this name; GET /jobs/{id}/artifacts lists them")
    return artifact
