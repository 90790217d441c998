"""Conversion of database rows to the views that clients see."""

from typing import TYPE_CHECKING, Any, cast

from app.api.resources import (
    AllocationView,
    ArtifactView,
    CalibrationView,
    EventView,
    Frontier,
    JobView,
    LayerAllocation,
    LayerView,
    ProfileView,
    ProgressView,
    SizeView,
)
from app.services.outputs import Layer
from app.services.profiles import Predicted
from app.shared.lifecycle import Status
from app.shared.models import Artifact, Job, JobEvent, Profile, Upload
from app.shared.outcomes import JobError, JobResult
from app.shared.requests import UPLOAD, CalibrationRequest, JobOptions, JobRequest, Queue
from rocket_core.candidates import LayerProfile

if TYPE_CHECKING:
    from rocket_core.allocation.predictor import Predictor


def profile_view(profile: Profile) -> ProfileView:
    """Return a profile's view."""
    path = f"/profiles/{profile.id}"
    return ProfileView(
        id=profile.id,
        model_id=profile.model_id,
        calibration=CalibrationRequest.model_validate(profile.calibration),
        options=JobOptions.model_validate(profile.options),
        layers=profile.layer_count,
        reachable_ratio=profile.reachable_ratio,
        created_at=profile.created_at,
        used_at=profile.used_at,
        links={"self": path, "frontier": f"{path}/frontier", "allocations": f"{path}/allocations"},
    )


def frontier_view(predictor: "Predictor", points: list[dict[str, Any]]) -> Frontier:
    """Return the view of a profiled model's sizes."""
    profile = predictor.profile
    return Frontier(
        objective=profile.objective,
        budget=profile.budget_unit,
        compressible_parameters=profile.compressible_parameters,
        dense_bytes=profile.dense_bytes,
        data=[SizeView(**point, model_bytes=profile.other_bytes + point["stored_bytes"]) for point in points],
    )


def allocation_view(predicted: Predicted) -> AllocationView:
    """Return a predicted allocation's view."""
    candidates = [candidate for _, candidate in predicted.chosen]
    stored = sum(candidate.stored_bytes for candidate in candidates)
    return AllocationView(
        ratio=predicted.allocation.ratio,
        budget=predicted.allocation.budget_unit,
        kept_parameters=sum(candidate.kept_parameters for candidate in candidates),
        stored_bytes=stored,
        model_bytes=predicted.model_bytes,
        error=predicted.allocation.total_error,
        proven=predicted.allocation.proven,
        layers=[LayerAllocation(name=name, chosen=candidate) for name, candidate in predicted.chosen],
    )


def upload_view(upload: Upload) -> CalibrationView:
    """Return an upload's view."""
    return CalibrationView(
        id=UPLOAD + upload.id,
        size=upload.size,
        documents=upload.documents,
        sha256=upload.sha256,
        created_at=upload.created_at,
    )


def job_view(job: Job) -> JobView:
    """Return a job's view."""
    request = JobRequest.model_validate(job.request)
    path = job_path(job)
    parts = ("events", "layers", "report", "artifacts", "cancel", "retry")
    return JobView(
        id=job.id,
        kind=request.kind,
        status=Status(job.status),
        stage=job.stage,
        progress=job.progress,
        **{name: getattr(request, name) for name in JobRequest.model_fields if name != "queue"},
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        estimated_finish_at=job.estimated_finish_at,
        expires_at=job.expires_at,
        # Set even where the request named none.
        queue=cast("Queue", job.queue),
        warnings=job.warnings,
        attempt=job.attempt,
        retry_of=job.retry_of,
        profile_id=job.profile_id,
        error=None if job.error is None else JobError.model_validate(job.error),
        result=None if job.result is None else JobResult.model_validate(job.result),
        links={"self": path, **{part: f"{path}/{part}" for part in parts}},
    )


def job_path(job: Job) -> str:
    """Return a job's path."""
    return f"/jobs/{job.id}"


def event_view(event: JobEvent) -> EventView:
    """Return an event's view."""
    fields = {name: getattr(event, name) for name in EventView.model_fields if name != "id"}
    return EventView(id=event.sequence, **fields)


def progress_view(job: Job) -> ProgressView:
    """Return the parts of a job that change while it runs."""
    return ProgressView(**{name: getattr(job, name) for name in ProgressView.model_fields})


def layer_view(layer: Layer) -> LayerView:
    """Return a layer's view."""
    return LayerView(**{name: getattr(layer.profile, name) for name in LayerProfile.model_fields}, chosen=layer.chosen)


def artifact_view(artifact: Artifact) -> ArtifactView:
    """Return an artifact's view."""
    return ArtifactView(**{name: getattr(artifact, name) for name in ArtifactView.model_fields})
