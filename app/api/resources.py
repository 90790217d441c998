"""What the endpoints answer: jobs, profiles, files and their parts, as a client sees them."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.shared.lifecycle import Status
from app.shared.outcomes import JobError, JobResult
from app.shared.requests import CalibrationRequest, EvaluationRequest, JobKind, JobOptions, Queue
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import Budget, Objective
from rocket_core.schema import described


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=described)


class _List(_Frozen):
    """Several of a kind.

    Attributes:
        object: always `list`.
    """

    object: Literal["list"] = "list"


class JobView(_Frozen):
    """A job.

    Attributes:
        id: its name: `job_` and 26 digits and small letters, which rise with the time of submission.
        object: always `job`.
        kind: `compression`, or `profile` for one that profiles layers and no more: it has a profile, but neither
            result nor artifacts.
        status: queued, running, cancelling, succeeded, failed or cancelled; new ones may be added.
        stage: what a running job does, or an ended one did last: downloading, preflight, differentiating, calibrating,
            allocating, factorizing, exporting or evaluating; new ones may be added. Null before the first.
        progress: of the whole job, [0, 1].
        model_id: the model, as asked for.
        revision: branch, tag or commit of the repository, as asked for; null for its main branch, or a local model.
        ratio: fraction of the compressible parameters to remove, [0, 1); null where a size is asked for, or a profile.
        target_bytes: most bytes that the factored artifact may take; null where a ratio is asked for, or a profile.
        calibration: the calibration data, with the defaults filled in.
        evaluate: how the result is compared with the dense model; null if it is not.
        options: settings of the method, with the defaults filled in.
        metadata: the client's own labels.
        created_at: when it was submitted.
        started_at: when a worker first took it; null before.
        finished_at: when it ended; null before.
        estimated_finish_at: when it should end; null while nobody can tell.
        expires_at: when its artifacts are deleted; null unless it has succeeded.
        queue: which workers run it.
        attempt: how often it has started, at least 0; what a stopping worker gave back does not count.
        retry_of: id of the job that this one repeats; null if it is none's repetition.
        profile_id: what it knows of the model apart from the ratio, for `/profiles/{id}`; null until all layers are
            profiled, and once that is deleted or has made room for others.
        error: why it failed; null unless it has.
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
    """A page of jobs, newest first; `after=last_id` is the next.

    Attributes:
        data: the jobs.
        has_more: whether there are older ones.
        first_id: id of the first job here; null if there is none.
        last_id: id of the last job here; null if there is none.
    """

    data: list[JobView]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EventView(_Frozen):
    """Something that happened to a job.

    Attributes:
        id: counts the events of the job from 1 without gaps.
        created_at: when it happened.
        level: info, warning or error.
        type: what kind of thing happened: status, stage, layer, profile, allocation, costs, message, error, hub_token
            or lease_lost; new ones may be added.
        message: a line for people.
        data: the same for programs; its members depend on the type.
    """

    id: int
    created_at: datetime
    level: str
    type: str
    message: str
    data: dict[str, Any]


class EventList(_List):
    """A page of events, oldest first; `after=last_id` is the next.

    Attributes:
        data: the events.
        has_more: whether there are newer ones already.
        last_id: number of the last event here; null if there is none.
    """

    data: list[EventView]
    has_more: bool
    last_id: int | None


class ProgressView(_Frozen):
    """Where a job is, as its stream of events tells it.

    Attributes:
        status: as of the job.
        stage: as of the job.
        progress: of the whole job, [0, 1].
        estimated_finish_at: when it should end; null while nobody can tell.
    """

    status: Status
    stage: str | None
    progress: float
    estimated_finish_at: datetime | None


class LayerView(LayerProfile):
    """A layer's profile, and the candidate that it got.

    Attributes:
        chosen: the candidate that it got; null before the allocation.
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
        name: its name, as `/jobs/{id}/artifacts/{name}` takes it; may hold `/`.
        size: bytes.
        sha256: hash of its content, 64 hexadecimal digits.
        media_type: what its content is.
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
        data: the files; none before the job has succeeded.
    """

    data: list[ArtifactView]


class NamedView(_Frozen):
    """Something that this server offers by name.

    Attributes:
        id: the name, as a job takes it.
    """

    id: str


class NamedList(_List):
    """All that this server offers by name.

    Attributes:
        data: the names.
    """

    data: list[NamedView]


class CalibrationView(_Frozen):
    """Text to calibrate on.

    Attributes:
        id: as `calibration.dataset` takes it.
        size: bytes of an upload; null for what the server offers.
        documents: documents of an upload, at least 1; null for what the server offers.
        sha256: hash of its content, 64 hexadecimal digits; null for what the server offers.
        created_at: when it was uploaded first; null for what the server offers.
    """

    id: str
    size: int | None = None
    documents: int | None = None
    sha256: str | None = None
    created_at: datetime | None = None


class CalibrationList(_List):
    """All text to calibrate on.

    Attributes:
        data: what the server offers, then the caller's uploads.
    """

    data: list[CalibrationView]


class ProfileView(_Frozen):
    """What is known of a model before a ratio is chosen.

    Attributes:
        id: its name: `prof_` and 26 digits and small letters, which rise with the time of its making.
        object: always `profile`.
        model_id: the model, as the job that made it named it.
        calibration: the calibration data.
        options: of that job; a later job takes the profile over if those that a profile depends on are the same.
        layers: how many are profiled.
        reachable_ratio: the largest ratio that can be reached, [0, 1).
        created_at: when it was made.
        used_at: when a job last made or found it.
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
    """A page of profiles, newest first; `after=last_id` is the next.

    Attributes:
        data: the profiles.
        has_more: whether there are older ones.
        first_id: id of the first profile here; null if there is none.
        last_id: id of the last profile here; null if there is none.
    """

    data: list[ProfileView]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SizeView(_Frozen):
    """A model at one ratio, as its profile predicts it.

    Attributes:
        ratio: fraction to remove, of what the budget counts, [0, 1).
        kept_parameters: what is left of the compressible parameters.
        stored_bytes: of the compressible layers, masks included.
        model_bytes: of all weights of the model.
        error: sum of the objective over the layers, at least 0.
    """

    ratio: float
    kept_parameters: int
    stored_bytes: int
    model_bytes: int
    error: float


class Frontier(_List):
    """A model at all ratios, by rising ratio.

    Attributes:
        objective: what `error` is: `fisher` (nats per token), `whitened` or `weight`.
        budget: what ratios are fractions of: parameters or bytes.
        compressible_parameters: of the profiled layers as they are.
        dense_bytes: of all weights as they are.
        data: one point for each hundredth, and one for the largest ratio that can be reached.
    """

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
        object: always `allocation`.
        budget: what `ratio` is a fraction of; bytes where a size was asked for.
        proven: whether no other choice of candidates has less error.
        layers: what each would get, in the order of the model.
    """

    object: Literal["allocation"] = "allocation"
    budget: Budget
    proven: bool
    layers: list[LayerAllocation]
