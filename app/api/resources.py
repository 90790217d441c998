"""Response models of the endpoints: jobs, profiles, files and their parts, as clients see them."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.shared.lifecycle import Status
from app.shared.outcomes import JobError, JobResult
from app.shared.requests import CalibrationRequest, EvaluationRequest, JobKind, JobOptions, Queue
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import BudgetUnit, Objective
from rocket_core.schema import described


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=described)


class _List(_Frozen):
    """A list of objects.

    Attributes:
        object: always `list`.
    """

    object: Literal["list"] = "list"


class JobView(_Frozen):
    """A job.

    Attributes:
        id: id of the job: `job_` and 26 digits and lowercase letters, which increase with the time of submission.
        object: always `job`.
        kind: `compression`, or `profile` for a job that only profiles layers: it has a profile, but neither result nor
            artifacts.
        status: queued, running, cancelling, succeeded, failed or cancelled; new ones may be added.
        stage: current stage of a running job, or last stage of an ended one: downloading, preflight, differentiating,
            calibrating, allocating, factorizing, exporting or evaluating; new ones may be added. Null before the first.
        progress: progress of the whole job, [0, 1].
        model_id: the model, as requested.
        revision: requested branch, tag or commit of the repository; null for its main branch, or a local model.
        ratio: fraction of the compressible parameters to remove, [0, 1); null if a size or a profile is requested.
        target_bytes: upper bound on the factored artifact's bytes; null if a ratio or a profile is requested.
        calibration: the calibration data, with the defaults filled in.
        evaluate: how the result is compared with the dense model; null for no evaluation.
        options: settings of the method, with the defaults filled in.
        metadata: the client's own labels.
        created_at: when it was submitted.
        started_at: when a worker first claimed it; null before.
        finished_at: when it ended; null before.
        estimated_finish_at: estimated end; null while unknown.
        expires_at: when its artifacts are deleted; null unless it has succeeded.
        queue: the queue, which decides which workers run it.
        attempt: number of attempts so far, at least 0; jobs returned by a stopping worker are not counted.
        retry_of: id of the job that this one retries; null if it is not a retry.
        profile_id: id of its profile, for `/profiles/{id}`; null until all layers are profiled, and after the profile
            is deleted or evicted.
        error: why it failed; null unless it has failed.
        result: what it achieved; null unless it has succeeded.
        links: paths of the job and its parts, by name.
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


class JobList(_List):
    """A page of jobs, newest first; `after=last_id` gives the next page.

    Attributes:
        data: the jobs.
        has_more: whether there are older ones.
        first_id: id of the first job on this page; null if the page is empty.
        last_id: id of the last job on this page; null if the page is empty.
    """

    data: list[JobView]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EventView(_Frozen):
    """An event of a job.

    Attributes:
        id: number of the event within the job, from 1 without gaps.
        created_at: when it happened.
        level: info, warning or error.
        type: kind of event: status, stage, layer, profile, allocation, costs, message, error, hub_token or lease_lost;
            new ones may be added.
        message: one line for humans.
        data: the same for programs; its members depend on the type.
    """

    id: int
    created_at: datetime
    level: str
    type: str
    message: str
    data: dict[str, Any]


class EventList(_List):
    """A page of events, oldest first; `after=last_id` gives the next page.

    Attributes:
        data: the events.
        has_more: whether there are newer ones already.
        last_id: number of the last event on this page; null if the page is empty.
    """

    data: list[EventView]
    has_more: bool
    last_id: int | None


class ProgressView(_Frozen):
    """The progress of a job, as its event stream reports it.

    Attributes:
        status: status of the job.
        stage: stage of the job.
        progress: progress of the whole job, [0, 1].
        estimated_finish_at: estimated end; null while unknown.
    """

    status: Status
    stage: str | None
    progress: float
    estimated_finish_at: datetime | None


class LayerView(LayerProfile):
    """A layer's profile, and the candidate chosen for it.

    Attributes:
        chosen: the chosen candidate; null before the allocation.
    """

    chosen: Candidate | None


class LayerList(_List):
    """All layers profiled so far, in the order of the model.

    Attributes:
        data: the layers.
    """

    data: list[LayerView]


class ArtifactView(_Frozen):
    """A file to download, until it expires.

    Attributes:
        name: name for `/jobs/{id}/artifacts/{name}`; may contain `/`.
        size: size in bytes.
        sha256: hash of its content, 64 hexadecimal digits.
        media_type: media type of its content.
        expires_at: when it is deleted.
    """

    name: str
    size: int
    sha256: str
    media_type: str
    expires_at: datetime


class ArtifactList(_Frozen):
    """All files of a job.

    Attributes:
        data: the files; empty before the job has succeeded.
    """

    data: list[ArtifactView]


class NamedView(_Frozen):
    """Something that this server offers by name.

    Attributes:
        id: the name to use in a job's request.
    """

    id: str


class NamedList(_List):
    """Everything of one kind that this server offers by name.

    Attributes:
        data: the names.
    """

    data: list[NamedView]


class CalibrationView(_Frozen):
    """A calibration dataset.

    Attributes:
        id: the value to use as `calibration.dataset`.
        size: size of an upload in bytes; null for the server's own datasets.
        documents: number of documents of an upload, at least 1; null for the server's own datasets.
        sha256: hash of an upload's content, 64 hexadecimal digits; null for the server's own datasets.
        created_at: when it was first uploaded; null for the server's own datasets.
    """

    id: str
    size: int | None = None
    documents: int | None = None
    sha256: str | None = None
    created_at: datetime | None = None


class CalibrationList(_List):
    """All calibration datasets.

    Attributes:
        data: the server's own datasets, then the caller's uploads.
    """

    data: list[CalibrationView]


class ProfileView(_Frozen):
    """The profile of a model: what is known before a ratio is chosen.

    Attributes:
        id: id of the profile: `prof_` and 26 digits and lowercase letters, which increase with the time of creation.
        object: always `profile`.
        model_id: the model, as named by the job that made the profile.
        calibration: the calibration data.
        options: options of that job; a later job reuses the profile if the options that it depends on are the same.
        layers: number of profiled layers.
        reachable_ratio: the largest reachable ratio, [0, 1).
        created_at: when it was made.
        used_at: when a job last made or used it.
        links: paths of the profile and its parts, by name.
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


class ProfileList(_List):
    """A page of profiles, newest first; `after=last_id` gives the next page.

    Attributes:
        data: the profiles.
        has_more: whether there are older ones.
        first_id: id of the first profile on this page; null if the page is empty.
        last_id: id of the last profile on this page; null if the page is empty.
    """

    data: list[ProfileView]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SizeView(_Frozen):
    """The predicted size and error of a model at one ratio.

    Attributes:
        ratio: fraction of the budget unit to remove, [0, 1).
        kept_parameters: what remains of the compressible parameters.
        stored_bytes: bytes of the compressible layers, masks included.
        model_bytes: bytes of all weights of the model.
        error: sum of the objective over the layers, at least 0.
    """

    ratio: float
    kept_parameters: int
    stored_bytes: int
    model_bytes: int
    error: float


class Frontier(_List):
    """The predicted sizes and errors of a model, by increasing ratio.

    Attributes:
        objective: what `error` is: `fisher` (nats per token), `whitened` or `weight`.
        budget: the budget unit, which ratios are fractions of: parameters or bytes.
        compressible_parameters: parameters of the profiled layers before compression.
        dense_bytes: bytes of all weights before compression.
        data: one point per hundredth, and one for the largest reachable ratio.
    """

    objective: Objective
    budget: BudgetUnit
    compressible_parameters: int
    dense_bytes: int
    data: list[SizeView]


class LayerAllocation(_Frozen):
    """The predicted candidate of a layer.

    Attributes:
        name: module name of the layer.
        chosen: the candidate that it would get.
    """

    name: str
    chosen: Candidate


class AllocationView(SizeView):
    """A predicted allocation.

    Attributes:
        object: always `allocation`.
        budget: the budget unit of `ratio`; bytes if a size was requested.
        proven: whether the allocation is proven optimal: no other choice of candidates has a smaller error.
        layers: the candidate of each layer, in the order of the model.
    """

    object: Literal["allocation"] = "allocation"
    budget: BudgetUnit
    proven: bool
    layers: list[LayerAllocation]
