"""Rows as a client sees them."""

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from app.services.outputs import Layer
from app.services.profiles import Predicted
from app.shared.lifecycle import Status
from app.shared.models import Artifact, Job, JobEvent, Profile, Upload
from app.shared.outcomes import JobError, JobResult
from app.shared.requests import UPLOAD, CalibrationRequest, EvaluationRequest, JobKind, JobOptions, JobRequest, Queue
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import Budget, Objective
from rocket_core.descriptions import described

if TYPE_CHECKING:
    from rocket_core.model_profile import WhatIf


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=described)


class JobView(_Frozen):
    """A job.

    Attributes:
        kind: `compression`, or `profile` for one that profiles layers and no more: it has a profile, but neither
            result nor artifacts.
        status: queued, running, cancelling, succeeded, failed or cancelled; new ones may be added.
        stage: what a running job does.
        progress: of the whole job, [0, 1].
        ratio: fraction of the compressible parameters to remove; null where a size is asked for, or a profile.
        target_bytes: most that the factored artifact may take; null where a ratio is asked for, or a profile.
        attempt: how often it has started.
        retry_of: the job that this one repeats.
        queue: which workers run it.
        expires_at: when its artifacts are deleted; null unless it has succeeded.
        profile_id: what it knows of the model apart from the ratio, for `/profiles/{id}`; null until all layers are
            profiled, and once that is deleted or has made room for others.
        links: where its parts are.
    """

    id: str
    object: Literal["job"] = "job"
    kind: JobKind
    status: Status
    stage: str | None
    progress: float
    model_id: str
    revision: str | None
    ratio: float | None
    target_bytes: int | None
    calibration: CalibrationRequest
    evaluate: EvaluationRequest | None
    options: JobOptions
    metadata: dict[str, str]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    estimated_finish_at: datetime | None
    expires_at: datetime | None
    queue: Queue
    attempt: int
    retry_of: str | None
    profile_id: str | None
    error: JobError | None
    result: JobResult | None
    links: dict[str, str]


class JobList(_Frozen):
    """A page of jobs, newest first; `after=last_id` is the next."""

    object: Literal["list"] = "list"
    data: list[JobView]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EventView(_Frozen):
    """Something that happened to a job; `id` counts from 1 without gaps."""

    id: int
    created_at: datetime
    level: str
    type: str
    message: str
    data: dict[str, Any]


class EventList(_Frozen):
    """A page of events, oldest first; `after=last_id` is the next."""

    object: Literal["list"] = "list"
    data: list[EventView]
    has_more: bool
    last_id: int | None


class ProgressView(_Frozen):
    """Where a job is, as its stream of events tells it."""

    status: Status
    stage: str | None
    progress: float
    estimated_finish_at: datetime | None


class LayerView(LayerProfile):
    """A layer's profile, and the candidate that it got."""

    chosen: Candidate | None


class LayerList(_Frozen):
    """All layers profiled so far, in the order of the model."""

    object: Literal["list"] = "list"
    data: list[LayerView]


class ArtifactView(_Frozen):
    """A file to download, until it expires."""

    name: str
    size: int
    sha256: str
    media_type: str
    expires_at: datetime


class ArtifactList(_Frozen):
    """All files of a job."""

    data: list[ArtifactView]


class NamedView(_Frozen):
    """Something that this server offers by name."""

    id: str


class NamedList(_Frozen):
    """All that this server offers by name."""

    object: Literal["list"] = "list"
    data: list[NamedView]


class CalibrationView(_Frozen):
    """Text to calibrate on.

    Attributes:
        id: as `calibration.dataset` takes it.
        size: bytes of an upload; null for what the server offers.
        documents: documents of an upload.
        sha256: hash of its content.
        created_at: when it was uploaded first.
    """

    id: str
    size: int | None = None
    documents: int | None = None
    sha256: str | None = None
    created_at: datetime | None = None


class CalibrationList(_Frozen):
    """All text to calibrate on."""

    object: Literal["list"] = "list"
    data: list[CalibrationView]


class ProfileView(_Frozen):
    """What is known of a model before a ratio is chosen.

    Attributes:
        model_id: the model, as the job that made it named it.
        calibration: the calibration data.
        options: of that job; a later job takes the profile over if those that a profile depends on are the same.
        layers: how many are profiled.
        reachable_ratio: the largest ratio that can be reached.
        used_at: when a job last made or found it.
        links: where its parts are.
    """

    id: str
    object: Literal["profile"] = "profile"
    model_id: str
    calibration: CalibrationRequest
    options: JobOptions
    layers: int
    reachable_ratio: float
    created_at: datetime
    used_at: datetime
    links: dict[str, str]


class ProfileList(_Frozen):
    """A page of profiles, newest first; `after=last_id` is the next."""

    object: Literal["list"] = "list"
    data: list[ProfileView]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SizeView(_Frozen):
    """A model at one ratio, as its profile predicts it.

    Attributes:
        ratio: fraction to remove, of what the budget counts.
        kept_parameters: what is left of the compressible parameters.
        stored_bytes: of the compressible layers, masks included.
        model_bytes: of all weights of the model.
        error: sum of the objective over the layers.
    """

    ratio: float
    kept_parameters: int
    stored_bytes: int
    model_bytes: int
    error: float


class Frontier(_Frozen):
    """A model at all ratios, by rising ratio.

    Attributes:
        objective: what `error` is: `fisher` (nats per token), `whitened` or `weight`.
        budget: what ratios are fractions of: parameters or bytes.
        compressible_parameters: of the profiled layers as they are.
        dense_bytes: of all weights as they are.
        data: one point for each hundredth, and one for the largest ratio that can be reached.
    """

    object: Literal["list"] = "list"
    objective: Objective
    budget: Budget
    compressible_parameters: int
    dense_bytes: int
    data: list[SizeView]


class LayerAllocation(_Frozen):
    """What a layer would get.

    Attributes:
        name: module name.
        chosen: its candidate.
    """

    name: str
    chosen: Candidate


class AllocationView(SizeView):
    """An allocation that nobody has carried out.

    Attributes:
        budget: what `ratio` is a fraction of; bytes where a size was asked for.
        proven: whether no other choice of candidates has less error.
        layers: what each would get, in the order of the model.
    """

    object: Literal["allocation"] = "allocation"
    budget: Budget
    proven: bool
    layers: list[LayerAllocation]


def profile_view(profile: Profile) -> ProfileView:
    """A profile's row as a client sees it."""
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


def frontier_view(what_if: "WhatIf", points: list[dict[str, Any]]) -> Frontier:
    """The sizes of a profiled model as a client sees them."""
    profile = what_if.profile
    return Frontier(
        objective=profile.objective,
        budget=profile.measure,
        compressible_parameters=profile.compressible_parameters,
        dense_bytes=profile.dense_bytes,
        data=[SizeView(**point, model_bytes=profile.other_bytes + point["stored_bytes"]) for point in points],
    )


def allocation_view(predicted: Predicted) -> AllocationView:
    """A predicted allocation as a client sees it."""
    candidates = [candidate for _, candidate in predicted.chosen]
    stored = sum(candidate.stored_bytes for candidate in candidates)
    return AllocationView(
        ratio=predicted.allocation.ratio,
        budget=predicted.allocation.measure,
        kept_parameters=sum(candidate.kept_parameters for candidate in candidates),
        stored_bytes=stored,
        model_bytes=predicted.model_bytes,
        error=predicted.allocation.total_error,
        proven=predicted.allocation.proven,
        layers=[LayerAllocation(name=name, chosen=candidate) for name, candidate in predicted.chosen],
    )


def upload_view(upload: Upload) -> CalibrationView:
    """An upload's row as a client sees it."""
    return CalibrationView(
        id=UPLOAD + upload.id,
        size=upload.size,
        documents=upload.documents,
        sha256=upload.sha256,
        created_at=upload.created_at,
    )


def job_view(job: Job) -> JobView:
    """A job's row as a client sees it."""
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
        # Also where the request named none.
        queue=cast("Queue", job.queue),
        attempt=job.attempt,
        retry_of=job.retry_of,
        profile_id=job.profile_id,
        error=None if job.error is None else JobError.model_validate(job.error),
        result=None if job.result is None else JobResult.model_validate(job.result),
        links={"self": path, **{part: f"{path}/{part}" for part in parts}},
    )


def job_path(job: Job) -> str:
    """Where a job is."""
    return f"/jobs/{job.id}"


def event_view(event: JobEvent) -> EventView:
    """An event's row as a client sees it."""
    fields = {name: getattr(event, name) for name in EventView.model_fields if name != "id"}
    return EventView(id=event.sequence, **fields)


def progress_view(job: Job) -> ProgressView:
    """The part of a job's row that changes all the time."""
    return ProgressView(**{name: getattr(job, name) for name in ProgressView.model_fields})


def layer_view(layer: Layer) -> LayerView:
    """A layer as a client sees it."""
    return LayerView(**{name: getattr(layer.profile, name) for name in LayerProfile.model_fields}, chosen=layer.chosen)


def artifact_view(artifact: Artifact) -> ArtifactView:
    """An artifact's row as a client sees it."""
    return ArtifactView(**{name: getattr(artifact, name) for name in ArtifactView.model_fields})
