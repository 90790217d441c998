"""Conversion of database rows to the views that clients see."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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
    LinkView,
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
from app.shared.models import (
    Artifact,
    Job,
    JobEvent,
    Link,
    ModelFile,
    ModelPiece,
    Profile,
    Upload,
    UploadedModel,
    Webhook,
    WebhookDelivery,
)
from app.shared.repositories.works import WorkOnJob
from app.shared.requests import UPLOAD, JobRequest
from app.shared.settings import Settings
from app.shared.works import WORKS
from rocket_core.schema import FrozenModel

if TYPE_CHECKING:
    from rocket_core.allocation.predictor import Predictor

View = TypeVar("View", bound=FrozenModel)

# Members of a request whose current value is a column of the job.
_OF_THE_ROW = frozenset({"queue", "source_job_id", "on_source"})
# Views of work whose result is a report and not an artifact.
_WORK_VIEWS: Mapping[str, type[EvaluationView | PushView]] = {"evaluation": EvaluationView, "push": PushView}


def _view(kind: type[View], row: object, /, **members: object) -> View:
    """Return a view of an object: members that are not given are its attributes of the same names."""
    found = {name: getattr(row, name) for name in kind.model_fields if name not in members and hasattr(row, name)}
    return kind(**found, **members)


def profile_view(profile: Profile) -> ProfileView:
    """Return a profile's view."""
    path = f"/profiles/{profile.id}"
    links = {"self": path, "frontier": f"{path}/frontier", "allocations": f"{path}/allocations"}
    return _view(ProfileView, profile, layers=profile.layer_count, links=links)


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
    return _view(CalibrationView, upload, id=UPLOAD + upload.id)


def named_model_view(model: UploadedModel) -> NamedModelView:
    """Return an uploaded model's entry in the list of all models."""
    problem = "parts of it have not arrived; `rocket upload` with its folder sends the rest"
    return NamedModelView(id=UPLOAD + model.name, problem=None if model.phase == "ready" else problem)


def model_upload_view(upload: UploadState, settings: Settings) -> ModelUploadView:
    """Return the view of a model's upload."""
    model = upload.model
    return _view(
        ModelUploadView,
        model,
        id=UPLOAD + model.name,
        status=model.phase,
        received=sum(file.received for file in upload.files),
        piece_bytes=settings.max_upload_bytes,
        files=tuple(map(received_file_view, upload.files)),
    )


def received_file_view(file: ModelFile) -> ReceivedFileView:
    """Return the view of a model's file."""
    return _view(ReceivedFileView, file)


def uploaded_file_view(file: ModelFile, pieces: Sequence[ModelPiece]) -> UploadedFileView:
    """Return the view of a model's file with its pieces."""
    return _view(UploadedFileView, file, pieces=tuple(_view(UploadedPieceView, piece) for piece in pieces))


def webhook_view(hook: Webhook) -> WebhookView:
    """Return a webhook's view, without its secret."""
    return _view(WebhookView, hook, events=tuple(hook.events.split()))


def link_view(link: Link) -> LinkView:
    """Return a link's view, without its token."""
    return _view(LinkView, link)


def delivery_view(delivery: WebhookDelivery) -> DeliveryView:
    """Return a delivery's view."""
    return _view(DeliveryView, delivery, attempts=delivery.attempt, next_attempt_at=delivery.available_at)


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
    parts = ("events", "layers", "report", "artifacts", *(work.path for work in WORKS.values()))
    actions = ("cancel", "retry")
    return _view(
        JobView,
        job,
        kind=request.kind,
        **{name: getattr(request, name) for name in JobRequest.model_fields if name not in _OF_THE_ROW},
        links={"self": path, **{part: f"{path}/{part}" for part in (*parts, *actions)}},
    )


def job_path(job: Job) -> str:
    """Return a job's path."""
    return f"/jobs/{job.id}"


def event_view(event: JobEvent) -> EventView:
    """Return an event's view."""
    return _view(EventView, event, id=event.sequence)


def progress_view(job: Job) -> ProgressView:
    """Return the parts of a job that change while it runs."""
    return _view(ProgressView, job)


def layer_view(layer: Layer) -> LayerView:
    """Return a layer's view."""
    return _view(LayerView, layer.profile, chosen=layer.chosen)


def work_view(work: WorkOnJob) -> JobView | EvaluationView | PushView:
    """Return the view of work on a job's result."""
    job = job_view(work.job)
    view = _WORK_VIEWS.get(job.kind)
    return job if view is None else view.model_validate({"job": job, "report": work.report})


def artifact_view(artifact: Artifact) -> ArtifactView:
    """Return an artifact's view."""
    return _view(ArtifactView, artifact)
