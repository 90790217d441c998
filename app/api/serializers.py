"""Conversion of database rows to the views that clients see."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from app.api.resources import (
    AllocationView,
    ArtifactView,
    CalibrationView,
    DeliveryView,
    EvaluationView,
    EventView,
    Frontier,
    JobView,
    LayerAllocation,
    LayerView,
    ModelUploadView,
    NamedModelView,
    ProfileView,
    ProgressView,
    PushView,
    ReceivedFileView,
    SizeView,
    UploadedFileView,
    UploadedPieceView,
    WebhookView,
)
from app.services import evaluations
from app.services.context import Context
from app.services.models import UploadState
from app.services.outputs import Layer
from app.services.profiles import Predicted
from app.shared.lifecycle import Status
from app.shared.models import (
    Artifact,
    Job,
    JobEvent,
    ModelFile,
    ModelPiece,
    Profile,
    Upload,
    UploadedModel,
    Webhook,
    WebhookDelivery,
)
from app.shared.outcomes import JobError, JobResult
from app.shared.repositories.evaluations import Evaluation
from app.shared.repositories.pushes import Push
from app.shared.requests import UPLOAD, CalibrationRequest, JobOptions, JobRequest, Queue
from app.shared.settings import Settings
from rocket_core.candidates import LayerProfile

if TYPE_CHECKING:
    from rocket_core.allocation.predictor import Predictor

# Members of a request whose current value is a column of the job.
_OF_THE_ROW = frozenset({"queue", "source_job_id", "on_source"})


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
        name=upload.name,
        size=upload.size,
        documents=upload.documents,
        sha256=upload.sha256,
        created_at=upload.created_at,
    )


def named_model_view(model: UploadedModel) -> NamedModelView:
    """Return an uploaded model's entry in the list of all models."""
    problem = "parts of it have not arrived; `rocket upload` with its folder sends the rest"
    return NamedModelView(id=UPLOAD + model.name, problem=None if model.phase == "ready" else problem)


def model_upload_view(upload: UploadState, settings: Settings) -> ModelUploadView:
    """Return the view of a model's upload."""
    model = upload.model
    return ModelUploadView(
        id=UPLOAD + model.name,
        status=model.phase,
        size=model.size,
        received=sum(file.received for file in upload.files),
        parameters=model.parameters,
        piece_bytes=settings.max_upload_bytes,
        created_at=model.created_at,
        files=tuple(map(received_file_view, upload.files)),
    )


def received_file_view(file: ModelFile) -> ReceivedFileView:
    """Return the view of a model's file."""
    return ReceivedFileView(path=file.path, size=file.size, received=file.received)


def uploaded_file_view(file: ModelFile, pieces: Sequence[ModelPiece]) -> UploadedFileView:
    """Return the view of a model's file with its pieces."""
    arrived = tuple(UploadedPieceView(size=piece.size, sha256=piece.sha256) for piece in pieces)
    return UploadedFileView(**received_file_view(file).model_dump(), pieces=arrived)


def webhook_view(hook: Webhook) -> WebhookView:
    """Return a webhook's view, without its secret."""
    return WebhookView(id=hook.id, url=hook.url, events=tuple(hook.events.split()), created_at=hook.created_at)


def delivery_view(delivery: WebhookDelivery) -> DeliveryView:
    """Return a delivery's view."""
    return DeliveryView(
        id=delivery.id,
        event=delivery.event,
        attempts=delivery.attempt,
        created_at=delivery.created_at,
        next_attempt_at=delivery.available_at,
        delivered_at=delivery.delivered_at,
        error=delivery.error,
    )


def current_view(context: Context, job: Job) -> JobView:
    """Return the view of a job; see `current_views`."""
    return current_views(context, [job])[0]


def current_views(context: Context, found: Sequence[Job]) -> list[JobView]:
    """Return the views of a tenant's jobs, with a quality that was measured later in place of a predicted one."""
    results = evaluations.read_results(context, found)
    return [job_view(job).model_copy(update={"result": results.get(job.id)}) for job in found]


def job_view(job: Job) -> JobView:
    """Return a job's view, with the result that it ended with."""
    request = JobRequest.model_validate(job.request)
    path = job_path(job)
    parts = ("events", "layers", "report", "artifacts", "evaluations", "exports", "pushes", "healings")
    actions = ("cancel", "retry")
    return JobView(
        id=job.id,
        kind=request.kind,
        status=Status(job.status),
        stage=job.stage,
        progress=job.progress,
        **{name: getattr(request, name) for name in JobRequest.model_fields if name not in _OF_THE_ROW},
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
        source_job_id=job.source_job_id,
        profile_id=job.profile_id,
        error=None if job.error is None else JobError.model_validate(job.error),
        result=None if job.result is None else JobResult.model_validate(job.result),
        links={"self": path, **{part: f"{path}/{part}" for part in (*parts, *actions)}},
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


def evaluation_view(evaluation: Evaluation) -> EvaluationView:
    """Return an evaluation's view."""
    return EvaluationView(job=job_view(evaluation.job), report=evaluation.report)


def push_view(push: Push) -> PushView:
    """Return a push's view."""
    return PushView(job=job_view(push.job), report=push.report)


def artifact_view(artifact: Artifact) -> ArtifactView:
    """Return an artifact's view."""
    return ArtifactView(**{name: getattr(artifact, name) for name in ArtifactView.model_fields})
