"""Response models of the endpoints: jobs, profiles, files and their parts, as clients see them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from app.shared.lifecycle import Status
from app.shared.outcomes import JobError, JobResult
from app.shared.requests import (
    AcceptanceRequest,
    CalibrationRequest,
    EvaluationRequest,
    FitRequest,
    JobKind,
    JobOptions,
    PushTarget,
    Queue,
)
from app.shared.works import WorkKind
from rocket_client import models as contract
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import Objective
from rocket_core.engines import LaterExport
from rocket_core.report.push import PushReport
from rocket_core.report.quality import EvaluationReport
from rocket_core.schema import FrozenModel
from rocket_core.sizes.budget import BudgetUnit


class _List(FrozenModel):
    """A list of objects."""

    object: Literal["list"] = "list"
    """always `list`."""


class JobView(FrozenModel):
    """A job."""

    id: str
    """id of the job: `job_` and 26 digits and lowercase letters, which increase with the time of submission."""
    object: Literal["job"] = "job"
    """always `job`."""
    kind: JobKind
    """`compression`; `profile` for a job that only profiles layers; `healing` for one that heals the result of an
    earlier job; `evaluation` for one that measures it; `export` for one that writes it in another format. Profiles and
    evaluations have neither result nor artifacts.
    """
    status: Status
    """queued, running, cancelling, succeeded, failed or cancelled; new ones may be added."""
    stage: str | None
    """current stage of a running job, or last stage of an ended one: downloading, preflight, differentiating,
    calibrating, allocating, factorizing, healing, exporting, evaluating or benchmarking; new ones may be added. Null
    before the first.
    """
    progress: float
    """progress of the whole job, [0, 1]."""
    model_id: str
    """the model, as requested."""
    revision: str | None
    """requested branch, tag or commit of the repository; null for its main branch, or a local model."""
    ratio: float | None
    """fraction of the compressible parameters to remove, [0, 1); null if another target or a profile is requested."""
    target_bytes: int | None
    """upper bound on the bytes of the artifact for the engine; null if another target or a profile is requested."""
    bits: float | None
    """upper bound on the compressible layers' bits per weight, (0, 16]; null if another target or a profile is
    requested.
    """
    fit: FitRequest | None
    """memory that weights, context and engine have to fit into; null if another target or a profile is requested."""
    max_kl: float | None
    """upper bound on the measured KL divergence, in nats per token; null if another target or a profile is requested.
    """
    max_perplexity_increase: float | None
    """upper bound on the measured increase of the perplexity, as a fraction; null if another target or a profile is
    requested.
    """
    calibration: CalibrationRequest
    """the calibration data, with the defaults filled in."""
    evaluate: EvaluationRequest | None
    """how the result is compared with the dense model; null for no evaluation."""
    accept: AcceptanceRequest | None
    """bounds that decide the verdict in `result`; null for no verdict."""
    benchmark: bool
    """whether speed and memory of the original and of each artifact are measured."""
    options: JobOptions
    """settings of the method, with the defaults filled in."""
    metadata: dict[str, str]
    """the client's own labels."""
    created_at: datetime
    """when it was submitted."""
    started_at: datetime | None
    """when a worker first claimed it; null before."""
    finished_at: datetime | None
    """when it ended; null before."""
    estimated_finish_at: datetime | None
    """estimated end; null while unknown."""
    expires_at: datetime | None
    """when its artifacts are deleted; null unless it has succeeded."""
    queue: Queue
    """the queue, which decides which workers run it."""
    warnings: list[str]
    """what was noticed when it was submitted, such as that little of the model is selected to be compressed."""
    attempt: int
    """number of attempts so far, at least 0; jobs returned by a stopping worker are not counted."""
    retry_of: str | None
    """id of the job that this one retries; null if it is not a retry."""
    source_job_id: str | None
    """id of the earlier job whose artifact it heals, evaluates, exports or pushes; null for others, and after that job
    is deleted.
    """
    export_to: LaterExport | None
    """format that a job of kind `export` writes; null for others."""
    push: PushTarget | None
    """where a job of kind `push` pushes files to; null for others."""
    profile_id: str | None
    """id of its profile, for `/profiles/{id}`; null until all layers are profiled, and after the profile is deleted or
    evicted.
    """
    error: JobError | None
    """why it failed; null unless it has failed."""
    result: JobResult | None
    """what it achieved; null unless it has succeeded."""
    links: dict[str, str]
    """paths of the job and its parts, by name."""


class JobList(_List):
    """A page of jobs, newest first; `after=last_id` gives the next page."""

    data: list[JobView]
    """the jobs."""
    has_more: bool
    """whether there are older ones."""
    first_id: str | None
    """id of the first job on this page; null if the page is empty."""
    last_id: str | None
    """id of the last job on this page; null if the page is empty."""


class EventView(contract.Event, extra="forbid"):
    """An event of a job."""

    data: dict[str, Any]
    """the same for programs; its members depend on the type."""


class EventList(_List):
    """A page of events, oldest first; `after=last_id` gives the next page."""

    data: list[EventView]
    """the events."""
    has_more: bool
    """whether there are newer ones already."""
    last_id: int | None
    """number of the last event on this page; null if the page is empty."""


class ProgressView(FrozenModel):
    """The progress of a job, as its event stream reports it."""

    status: Status
    """status of the job."""
    stage: str | None
    """stage of the job."""
    progress: float
    """progress of the whole job, [0, 1]."""
    estimated_finish_at: datetime | None
    """estimated end; null while unknown."""


class LayerView(LayerProfile):
    """A layer's profile, and the candidate chosen for it."""

    chosen: Candidate | None
    """the chosen candidate; null before the allocation."""


class LayerList(_List):
    """All layers profiled so far, in the order of the model."""

    data: list[LayerView]
    """the layers."""


class EvaluationView(FrozenModel):
    """An evaluation of a job's artifact."""

    job: JobView
    """the job that evaluates it."""
    report: EvaluationReport | None
    """its result; null before it has one."""


class EvaluationList(_List):
    """The latest evaluations of a job's artifact."""

    data: list[EvaluationView]
    """the evaluations, newest first."""


class ExportList(_List):
    """The latest jobs that write the result of a job in other formats."""

    data: list[JobView]
    """the jobs, newest first."""


class PushView(FrozenModel):
    """A push of a job's files to the Hub."""

    job: JobView
    """the job that pushes them."""
    report: PushReport | None
    """its result; null before it has one."""


class PushList(_List):
    """The latest pushes of a job's files to the Hub."""

    data: list[PushView]
    """the pushes, newest first."""


WORK_LISTS: Mapping[WorkKind, type[_List]] = {"evaluation": EvaluationList, "export": ExportList, "push": PushList}
"""The answers of the endpoints that list work on a job's result."""


class ArtifactView(contract.Artifact, extra="forbid"):
    """A file to download, until it expires."""

    expires_at: datetime
    """when it is deleted."""


class ArtifactList(FrozenModel):
    """All files of a job."""

    data: list[ArtifactView]
    """the files; empty before the job has succeeded."""


class NamedModelView(contract.NamedModel, extra="forbid"):
    """A model that this server offers by name, or what looks like one."""


class ModelList(_List):
    """All models that this server offers by name."""

    data: list[NamedModelView]
    """the models in the operator's folder, then the caller's uploads."""


class UploadedPieceView(contract.UploadedPiece, extra="forbid"):
    """Consecutive bytes of a file that have arrived."""


class ReceivedFileView(contract.ReceivedFile, extra="forbid"):
    """A file of a model, and how much of it has arrived."""


class UploadedFileView(contract.UploadedFile, extra="forbid"):
    """A file of a model, and what has arrived of it."""

    pieces: tuple[UploadedPieceView, ...]
    """what has arrived, in order."""


class ModelUploadView(contract.UploadedModel, extra="forbid"):
    """A model that was uploaded, or is being uploaded."""

    files: tuple[ReceivedFileView, ...]
    """its files, by path."""


class CalibrationView(FrozenModel):
    """A calibration dataset."""

    id: str
    """the value to use as `calibration.dataset`."""
    name: str | None = None
    """name of an upload's file; null if it was sent without one, and for the server's own datasets."""
    size: int | None = None
    """size of an upload in bytes; null for the server's own datasets."""
    documents: int | None = None
    """number of documents of an upload, at least 1; null for the server's own datasets."""
    sha256: str | None = None
    """hash of an upload's content, 64 hexadecimal digits; null for the server's own datasets."""
    created_at: datetime | None = None
    """when it was first uploaded; null for the server's own datasets."""


class CalibrationList(_List):
    """All calibration datasets."""

    data: list[CalibrationView]
    """the server's own datasets, then the caller's uploads."""


class WebhookView(contract.Webhook, extra="forbid"):
    """An address that ends of jobs are reported to."""


class NewWebhookView(contract.NewWebhook, extra="forbid"):
    """A webhook that was just created."""


class DeliveryView(contract.Delivery, extra="forbid"):
    """A delivery to a webhook."""


class WebhookDetailsView(contract.WebhookDetails, extra="forbid"):
    """A webhook, and its newest deliveries."""

    deliveries: tuple[DeliveryView, ...]
    """at most 20, newest first."""


class WebhookList(_List):
    """All webhooks."""

    data: list[WebhookView]
    """the webhooks, oldest first."""


class LinkView(contract.Link, extra="forbid"):
    """A link that shows a job to people without a key."""


class NewLinkView(contract.NewLink, extra="forbid"):
    """A link that was just created."""


class ProfileView(FrozenModel):
    """The profile of a model: what is known before a ratio is chosen."""

    id: str
    """id of the profile: `prof_` and 26 digits and lowercase letters, which increase with the time of creation."""
    object: Literal["profile"] = "profile"
    """always `profile`."""
    model_id: str
    """the model, as named by the job that made the profile."""
    calibration: CalibrationRequest
    """the calibration data."""
    options: JobOptions
    """options of that job; a later job reuses the profile if the options that it depends on are the same."""
    layers: int
    """number of profiled layers."""
    reachable_ratio: float
    """the largest reachable ratio, [0, 1)."""
    created_at: datetime
    """when it was made."""
    used_at: datetime
    """when a job last made or used it."""
    links: dict[str, str]
    """paths of the profile and its parts, by name."""


class ProfileList(_List):
    """A page of profiles, newest first; `after=last_id` gives the next page."""

    data: list[ProfileView]
    """the profiles."""
    has_more: bool
    """whether there are older ones."""
    first_id: str | None
    """id of the first profile on this page; null if the page is empty."""
    last_id: str | None
    """id of the last profile on this page; null if the page is empty."""


class SizeView(contract.Size, extra="forbid"):
    """The predicted size and error of a model at one ratio."""


class Frontier(_List):
    """The predicted sizes and errors of a model, by increasing ratio."""

    objective: Objective
    """what `error` is: `fisher` (nats per token), `whitened` or `weight`."""
    budget: BudgetUnit
    """the budget unit, which ratios are fractions of: parameters or bytes."""
    compressible_parameters: int
    """parameters of the profiled layers before compression."""
    dense_bytes: int
    """bytes of all weights before compression."""
    data: list[SizeView]
    """one point per hundredth, and one for the largest reachable ratio."""


class LayerAllocation(FrozenModel):
    """The predicted candidate of a layer."""

    name: str
    """module name of the layer."""
    chosen: Candidate
    """the candidate that it would get."""


class AllocationView(SizeView):
    """A predicted allocation."""

    object: Literal["allocation"] = "allocation"
    """always `allocation`."""
    budget: BudgetUnit
    """the budget unit of `ratio`; bytes if a size or bits per weight were requested."""
    proven: bool
    """whether the allocation is proven optimal: no other choice of candidates has a smaller error."""
    layers: list[LayerAllocation]
    """the candidate of each layer, in the order of the model."""
