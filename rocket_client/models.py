"""Typed resources of the service.

Members that a newer server adds are ignored, and a status may be unknown to this client. The service derives its
answers from the models whose members are the same on both sides: this module imports neither HTTP library nor torch.
"""

from datetime import datetime
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rocket_core.config import AcceptanceConfig, EvaluationConfig
from rocket_core.report.push import PushReport
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.verdict import Verdict
from rocket_core.schema import FrozenModel
from rocket_core.sizes.memory_fit import FittedMemory, MemoryFit

Item = TypeVar("Item", bound=BaseModel)

_Count = Annotated[int, Field(ge=0)]


class Resource(FrozenModel):
    """Base class of all resources."""

    model_config = ConfigDict(extra="ignore")


class Listing(Resource, Generic[Item]):
    """Some resources of one kind."""

    # pydantic looks for the source of `Listing[Job]`, which has none, in every frame of the stack: 10 of them took a
    # quarter of the time in which the service starts.
    model_config = ConfigDict(use_attribute_docstrings=False)

    data: tuple[Item, ...] = Field(description="the resources.")


class Page(Listing[Item], Generic[Item]):
    """Some resources of one kind, newest first."""

    has_more: bool = Field(description="whether there are older ones.")
    last_id: str | None = Field(default=None, description="id to pass as `after` for the next page.")


class Calibration(Resource):
    """Calibration data of a job."""

    dataset: str
    """`builtin`, the name of a dataset on the Hub, or `local/FILE`."""
    samples: int
    """number of windows of tokens."""
    sequence_length: int | None = None
    """tokens per window; None chooses by the model."""
    seed: int
    """seed for drawing windows."""


class Evaluation(EvaluationConfig, extra="ignore"):
    """Comparison of a result with the dense model; its text is named as in a calibration."""


class Acceptance(AcceptanceConfig, extra="ignore"):
    """What the measured result must meet to be accepted."""


class Fit(MemoryFit, extra="ignore"):
    """The memory that weights, context and engine have to fit into."""


class Division(FittedMemory, extra="ignore"):
    """How that memory is divided."""


class JobError(Resource):
    """The error of a failed job."""

    code: str
    """stable code of the error's class."""
    message: str
    """what is wrong, where, and what to do."""
    stage: str | None = None
    """stage in which it happened; None if it was in none."""
    layer: str | None = None
    """layer at which it happened; None if it was at none."""
    retryable: bool = False
    """whether the same job may succeed later."""


class JobResult(Resource):
    """The result of a job that has succeeded."""

    achieved_ratio: float
    """fraction of the compressible parameters removed, [0, 1)."""
    kept_parameters: _Count
    """what remains of them."""
    compressible_parameters: _Count
    """parameters of the selected linear layers."""
    stored_bytes: _Count
    """bytes of all safetensors files of the smallest export."""
    dense_bytes: _Count
    """bytes of all safetensors files of the original."""
    quality: str | None = None
    """quality as people read it, such as the perplexity before and after; null for jobs of earlier versions."""
    quality_is_measured: bool = False
    """whether the quality was measured, by the job or by a later evaluation; otherwise it is predicted."""
    verdict: Verdict | None = None
    """whether the measured quality is accepted; null if the request has no bounds (`accept`)."""


class PushTarget(Resource):
    """Where the files of a job are pushed to."""

    repository: str
    """`namespace/name` on the Hub."""
    private: bool = False
    """whether the repository must be private."""
    export: str
    """the export whose files are pushed."""


class Job(Resource):
    """A job."""

    id: str
    """id of the job."""
    kind: str = "compression"
    """`compression`; `profile` of a model's layers; `healing`, `evaluation` or `export` of an earlier job's result."""
    status: str
    """queued, running, cancelling, succeeded, failed, cancelled, or a newer one."""
    stage: str | None = None
    """current stage of a running job."""
    progress: float
    """progress of the whole job, [0, 1]."""
    model_id: str
    """the requested model."""
    revision: str | None = None
    """branch, tag or commit of a repository."""
    ratio: float | None = None
    """fraction of the compressible parameters to remove; None for another target, or a profile."""
    target_bytes: int | None = None
    """most bytes that the artifact for the engine may take; None for another target, or a profile."""
    bits: float | None = None
    """most bits per weight that the compressible layers may take; None for another target, or a profile."""
    fit: Fit | None = None
    """memory that weights, context and engine have to fit into; None for another target, or a profile."""
    max_kl: float | None = None
    """most KL divergence that is measured, in nats per token; None for another target, or a profile."""
    max_perplexity_increase: float | None = None
    """most increase of the perplexity that is measured, as a fraction; None for another target, or a profile."""
    calibration: Calibration
    """the calibration data."""
    evaluate: Evaluation | None = None
    """comparison of the result with the dense model; None skips it."""
    accept: Acceptance | None = None
    """bounds on what that measures; None gives no verdict."""
    benchmark: bool = False
    """whether speed and memory of the original and of each artifact are measured."""
    options: dict[str, JsonValue]
    """settings of the method, by name."""
    metadata: dict[str, str]
    """the client's own labels."""
    created_at: datetime
    """when it was submitted."""
    started_at: datetime | None = None
    """when a worker first claimed it."""
    finished_at: datetime | None = None
    """when it ended."""
    estimated_finish_at: datetime | None = None
    """when it is expected to end."""
    expires_at: datetime | None = None
    """when its artifacts are deleted; None unless it has succeeded."""
    queue: str | None = None
    """queue that it is in; None if the server has no queues."""
    warnings: tuple[str, ...] = ()
    """what the server noticed when it was submitted, such as that little of the model is selected."""
    attempt: int
    """number of times it has started."""
    retry_of: str | None = None
    """the job that this one retries."""
    source_job_id: str | None = None
    """the earlier job whose artifact it heals, evaluates, exports or pushes; None for other jobs, and after that job is
    deleted.
    """
    export_to: str | None = None
    """format that an export writes; None for other jobs."""
    push: PushTarget | None = None
    """where a push goes; None for other jobs."""
    profile_id: str | None = None
    """id of its profile, as `frontier` takes it; None before it has one, and after the profile is deleted."""
    error: JobError | None = None
    """why it failed."""
    result: JobResult | None = None
    """what it achieved."""

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.finished_at is not None


class LaterEvaluation(Resource):
    """An evaluation of a job's artifact."""

    job: Job
    """the job that evaluates it."""
    report: EvaluationReport | None = None
    """its result; None before it has one."""


class EvaluationList(Listing[LaterEvaluation]):
    """The latest evaluations of a job's artifact, newest first."""


class ExportList(Listing[Job]):
    """The latest jobs that write the result of a job in other formats, newest first."""


class LaterPush(Resource):
    """A push of a job's files to the Hub."""

    job: Job
    """the job that pushes them."""
    report: PushReport | None = None
    """its result; None before it has one."""


class PushList(Listing[LaterPush]):
    """The latest pushes of a job's files to the Hub, newest first."""


class JobPage(Page[Job]):
    """Some jobs, newest first."""


class Event(Resource):
    """An event of a job."""

    id: int
    """number of the event within the job, from 1 without gaps."""
    created_at: datetime
    """when it happened."""
    level: str
    """info, warning or error."""
    type: str
    """kind of event: status, stage, layer, profile, allocation, healing, costs, evaluation, push, message,
    error, hub_token or lease_lost; new ones may be added.
    """
    message: str
    """one line for humans."""
    data: dict[str, JsonValue]
    """the same for programs; its members depend on the type."""


class Progress(Resource):
    """Progress of a job."""

    status: str
    """its status."""
    stage: str | None = None
    """its current stage."""
    progress: float
    """progress of the whole job, [0, 1]."""
    estimated_finish_at: datetime | None = None
    """when it is expected to end."""


class Candidate(Resource):
    """One way to store a layer."""

    kind: str
    """dense, low_rank, factored, sparse, quantized or entropy_coded."""
    rank: int | None = None
    """number of atoms; None unless low-rank or factored."""
    nnz: int | None = None
    """number of nonzero coefficients or weights; None if dense or of codes."""
    dictionary: str | None = None
    """layer that owns the shared dictionary, which may be this one; None if not shared."""
    bits: int | None = None
    """bits of an integer code; None unless quantized."""
    group_size: int | None = None
    """inputs that share a scale; None unless quantized."""
    scale_bits: int | None = None
    """bits of a scale; None unless quantized."""
    block_type: str | None = None
    """block type such as Q4_K, affine4_64 or NVFP4, instead of the three before it; otherwise None."""
    kept_parameters: int
    """parameters that are left of the layer."""
    stored_bytes: int
    """bytes on disk."""
    reconstruction_error: float
    """relative error of the layer's output over the calibration tokens."""
    weight_error: float
    """relative error of the weights."""
    loss: float | None = None
    """expected increase of the model's loss, nats per token; None where sensitivities were not measured."""


class Layer(Resource):
    """Profile of a layer."""

    name: str
    """module name."""
    d_in: int
    """input features."""
    d_out: int
    """output features."""
    input_group: str
    """first layer that reads the same input."""
    tokens: int
    """number of calibration tokens that it was profiled on."""
    candidates: tuple[Candidate, ...]
    """ways to store it."""
    chosen: Candidate | None = None
    """the chosen candidate; None before the allocation."""


class LayerList(Listing[Layer]):
    """All layers profiled so far, in the order of the model."""


class Artifact(Resource):
    """A file to download, until it expires."""

    name: str
    """name for `/jobs/{id}/artifacts/{name}`; may contain `/`."""
    size: int
    """size in bytes."""
    sha256: str
    """hash of its content, 64 hexadecimal digits."""
    media_type: str
    """media type of its content."""
    expires_at: datetime | None = None
    """when it is deleted."""


class ArtifactList(Listing[Artifact]):
    """All files of a job."""


class Upload(Resource):
    """An uploaded calibration file."""

    id: str
    """`upload/ID`, as `submit` takes it."""
    name: str | None = None
    """name of the file when it was first uploaded."""
    size: int
    """size in bytes."""
    documents: int
    """number of documents in it."""
    sha256: str
    """hash of its content, hexadecimal."""


class Available(Resource):
    """Free resources where jobs run."""

    memory_bytes: _Count | None
    """free CPU memory; null where the system does not report it."""
    disk_bytes: _Count
    """free disk space of the data folder."""


class Estimate(Resource):
    """The estimated resources of a job.

    Only `commit`, `parameters` and `stored_bytes` are exact: they are those of the checkpoint's tensors. The rest is an
    estimate: only the job itself, which builds the model, knows which of its matrices can be compressed.
    """

    model_id: str
    """the model, as requested."""
    commit: str | None = None
    """commit that the revision points to now; null for a local model."""
    parameters: _Count
    """parameters of the whole model."""
    stored_bytes: _Count
    """bytes of its weights; also the download size of a model on the Hub."""
    compressible_parameters: _Count
    """parameters of the layers that can be compressed, without ignored ones."""
    kept_parameters: _Count
    """upper bound on the parameters kept at the ratio."""
    selected_bytes: _Count = 0
    """bytes of what is selected: the compressible layers, and token embedding and head where the target may be met by
    quantizing them.
    """
    warnings: tuple[str, ...] = ()
    """what should be known before a job is submitted, such as that little of the model is selected."""
    factored_bytes: _Count
    """upper bound on the weight bytes of the `rocket` artifact."""
    ratio: float
    """the requested ratio, [0, 1), or the fraction of the compressible layers' bytes to remove for the requested size;
    0 if only a profile is requested.
    """
    nearest_ratio: float
    """the same, or the highest ratio that is certainly reachable if that is less."""
    calibration_tokens: _Count
    """upper bound on the tokens read, or on what images and audio become in the model; short data have fewer."""
    memory_bytes: _Count
    """peak memory of the device that computes; an evaluation holds the whole model."""
    disk_bytes: _Count
    """disk space for checkpoints, artifacts and temporary files of an evaluation, without the download of the model."""
    fit: Division | None = None
    """how the memory of a fit is divided; null for other targets."""
    available: Available | None = None
    """free resources where jobs run; null where they run on other machines."""
    seconds: float | None = None
    """seconds that the job takes if the machine does nothing else, within a factor of 1.5 for most models; null if it
    is not known.
    """
    seconds_unknown: str | None = None
    """why `seconds` is null, in words; null if it is not, and from servers that do not say."""


class Named(Resource):
    """Something that this server offers by name."""

    id: str
    """the name to use in a job's request."""


class NamedModel(Named):
    """A model that this server offers by name, or what looks like one."""

    problem: str | None = None
    """why no job can use it yet, and what to do; None if jobs can."""


class NamedModelList(Listing[NamedModel]):
    """All models that the server offers by name."""


class UploadedPiece(Resource):
    """Consecutive bytes of a file that have arrived."""

    size: int
    """number of bytes."""
    sha256: str
    """their hash, 64 hexadecimal digits."""


class ReceivedFile(Resource):
    """A file of a model, and how much of it has arrived."""

    path: str
    """its path in the model's folder."""
    size: int
    """its size in bytes."""
    received: int
    """number of bytes that have arrived, from its start."""


class UploadedFile(ReceivedFile):
    """A file of a model, and what has arrived of it."""

    pieces: tuple[UploadedPiece, ...] = ()
    """what has arrived, in order."""


class UploadedModel(Resource):
    """A model that was uploaded, or is being uploaded."""

    id: str
    """`upload/NAME`, as `submit` takes it."""
    status: str
    """`headers` until the model was judged by its headers, `weights` until every byte has arrived, then `ready`."""
    size: int
    """bytes of all files."""
    received: int
    """number of bytes that have arrived."""
    parameters: int | None = None
    """number of parameters; null before the model was judged."""
    piece_bytes: int
    """most bytes that one request may append to a file."""
    created_at: datetime
    """when it was announced."""
    files: tuple[ReceivedFile, ...]
    """its files, by path."""


class NamedList(Listing[Named]):
    """Everything of one kind that the server offers by name."""


class Webhook(Resource):
    """An address that ends of jobs are reported to."""

    id: str
    """id of the webhook."""
    url: str
    """where deliveries are sent."""
    events: tuple[str, ...]
    """the events that are reported."""
    created_at: datetime
    """when it was created."""


class NewWebhook(Webhook):
    """A webhook that was just created."""

    secret: str
    """key that deliveries are signed with, `whsec_...`; it is not shown again."""


class Delivery(Resource):
    """A delivery to a webhook."""

    id: str
    """id of the delivery, the same in every attempt."""
    event: str
    """what happened."""
    attempts: int
    """number of attempts so far."""
    created_at: datetime
    """when it happened."""
    next_attempt_at: datetime | None = None
    """when it is sent next; None once it was delivered or given up."""
    delivered_at: datetime | None = None
    """when the receiver accepted it; None if it has not."""
    error: str | None = None
    """why the last attempt failed; None if it has not."""


class WebhookDetails(Webhook):
    """A webhook, and its newest deliveries."""

    deliveries: tuple[Delivery, ...]
    """at most 20, newest first."""


class WebhookList(Listing[Webhook]):
    """All webhooks."""


class Link(Resource):
    """A link that shows a job to people without a key."""

    with_files: bool
    """whether it also gives the files of the job."""
    created_at: datetime
    """when it was created."""


class NewLink(Link):
    """A link that was just created."""

    url: str
    """its address; it is not shown again."""


class Profile(Resource):
    """Profile of a model, independent of a ratio."""

    id: str
    """id of the profile."""
    model_id: str
    """the model, as named in the job that created the profile."""
    calibration: Calibration
    """the calibration data."""
    options: dict[str, JsonValue]
    """settings of that job, by name."""
    layers: int
    """number of profiled layers."""
    reachable_ratio: float
    """the largest reachable ratio."""
    created_at: datetime
    """when it was created."""
    used_at: datetime
    """when a job last created or used it."""


class ProfilePage(Page[Profile]):
    """Some profiles, newest first."""


class Size(Resource):
    """The predicted size and error of a model at one ratio."""

    ratio: float
    """fraction of the budget unit to remove, [0, 1)."""
    kept_parameters: int
    """what remains of the compressible parameters."""
    stored_bytes: int
    """bytes of the compressible layers, masks included."""
    model_bytes: int
    """bytes of all weights of the model."""
    error: float
    """sum of the objective over the layers, at least 0."""


class Frontier(Resource):
    """Predicted sizes and errors of a model at all ratios."""

    objective: str
    """measure of errors: `fisher` (nats per token), `whitened` or `weight`."""
    budget: str
    """budget unit: parameters or bytes."""
    compressible_parameters: int
    """parameters of the profiled layers before compression."""
    dense_bytes: int
    """bytes of all weights before compression."""
    data: tuple[Size, ...]
    """the points, by rising ratio."""


class LayerChoice(Resource):
    """Predicted choice for a layer."""

    name: str
    """module name."""
    chosen: Candidate
    """its candidate."""


class PredictedAllocation(Size):
    """A predicted allocation."""

    budget: str
    """budget unit of `ratio`; bytes for a target size or bits per weight."""
    proven: bool
    """whether no other choice of candidates has less error."""
    layers: tuple[LayerChoice, ...]
    """the predicted choices, in the order of the model."""
