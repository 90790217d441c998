"""Typed resources of the service.

Members that a newer server adds are ignored, and a status may be unknown to this client.
"""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, JsonValue


class Resource(BaseModel):
    """Base class of all resources."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Calibration(Resource):
    """Calibration data of a job.

    Attributes:
        dataset: `builtin`, the name of a dataset on the Hub, or `local/FILE`.
        samples: number of windows of tokens.
        sequence_length: tokens per window; None chooses by the model.
        seed: seed for drawing windows.
    """

    dataset: str
    samples: int
    sequence_length: int | None = None
    seed: int


class Evaluation(Resource):
    """Comparison of a result with the dense model.

    Attributes:
        dataset: as in a calibration.
        samples: number of windows of tokens.
        sequence_length: tokens per window; None chooses by the model.
        stride: tokens from the start of one window to the next; None means the sequence length.
        tasks: zero-shot tasks.
        task_items: items of each task; None means all.
    """

    dataset: str
    samples: int
    sequence_length: int | None = None
    stride: int | None = None
    tasks: tuple[str, ...] = ()
    task_items: int | None = None


class JobError(Resource):
    """Error of a failed job.

    Attributes:
        code: stable code of the kind of error.
        message: what is wrong, where, and what to do.
        stage: stage in which it happened; None if outside of any.
        layer: layer at which it happened; None if outside of any.
        retryable: whether the same job may succeed later.
    """

    code: str
    message: str
    stage: str | None = None
    layer: str | None = None
    retryable: bool = False


class JobResult(Resource):
    """Result of a job.

    Attributes:
        achieved_ratio: fraction of the compressible parameters removed, [0, 1).
        kept_parameters: number of compressible parameters that are left.
        compressible_parameters: parameters of the selected linear layers.
        stored_bytes: bytes of all safetensors of the smallest export.
        dense_bytes: bytes of all safetensors of the original.
    """

    achieved_ratio: float
    kept_parameters: int
    compressible_parameters: int
    stored_bytes: int
    dense_bytes: int


class Job(Resource):
    """A job.

    Attributes:
        id: id of the job.
        kind: `compression`, or `profile` for a job that only profiles layers.
        status: queued, running, cancelling, succeeded, failed, cancelled, or a newer one.
        stage: current stage of a running job.
        progress: progress of the whole job, [0, 1].
        model_id: the requested model.
        revision: branch, tag or commit of a repository.
        ratio: fraction of the compressible parameters to remove; None for a target size, or a profile.
        target_bytes: most bytes that the factored artifact may take; None for a ratio, or a profile.
        calibration: the calibration data.
        evaluate: comparison of the result with the dense model; None skips it.
        options: settings of the method, by name.
        metadata: the client's own labels.
        created_at: when it was submitted.
        started_at: when a worker first claimed it.
        finished_at: when it ended.
        estimated_finish_at: when it is expected to end.
        expires_at: when its artifacts are deleted; None unless it has succeeded.
        queue: queue that it is in; None if the server has no queues.
        attempt: number of times it has started.
        retry_of: the job that this one retries.
        profile_id: id of its profile, as `frontier` takes it; None before it has one, and after the profile is deleted.
        error: why it failed.
        result: what it achieved.
    """

    id: str
    kind: str = "compression"
    status: str
    stage: str | None = None
    progress: float
    model_id: str
    revision: str | None = None
    ratio: float | None = None
    target_bytes: int | None = None
    calibration: Calibration
    evaluate: Evaluation | None = None
    options: dict[str, JsonValue]
    metadata: dict[str, str]
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    estimated_finish_at: datetime | None = None
    expires_at: datetime | None = None
    queue: str | None = None
    attempt: int
    retry_of: str | None = None
    profile_id: str | None = None
    error: JobError | None = None
    result: JobResult | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.finished_at is not None


class JobPage(Resource):
    """Some jobs, newest first.

    Attributes:
        data: the jobs.
        has_more: whether there are older ones.
        last_id: id to pass as `after` for the next page.
    """

    data: tuple[Job, ...]
    has_more: bool
    last_id: str | None = None


class Event(Resource):
    """An event of a job.

    Attributes:
        id: number of the event, from 1 without gaps.
        created_at: when it happened.
        level: info, warning or error.
        type: kind of event: status, stage, layer, ...
        message: a line for people.
        data: the same for programs.
    """

    id: int
    created_at: datetime
    level: str
    type: str
    message: str
    data: dict[str, JsonValue]


class Progress(Resource):
    """Progress of a job.

    Attributes:
        status: its status.
        stage: its current stage.
        progress: progress of the whole job, [0, 1].
        estimated_finish_at: when it is expected to end.
    """

    status: str
    stage: str | None = None
    progress: float
    estimated_finish_at: datetime | None = None


class Candidate(Resource):
    """One way to store a layer.

    Attributes:
        kind: dense, low_rank, factored or sparse.
        rank: number of atoms; None if dense or sparse.
        nnz: number of nonzero coefficients or weights; None if dense.
        dictionary: layer that owns the shared dictionary, which may be this one; None if not shared.
        kept_parameters: parameters that are left of the layer.
        stored_bytes: bytes on disk.
        reconstruction_error: relative error of the layer's output over the calibration tokens.
        weight_error: relative error of the weights.
        loss: expected increase of the model's loss, nats per token; None where sensitivities were not measured.
    """

    kind: str
    rank: int | None = None
    nnz: int | None = None
    dictionary: str | None = None
    kept_parameters: int
    stored_bytes: int
    reconstruction_error: float
    weight_error: float
    loss: float | None = None


class Layer(Resource):
    """Profile of a layer.

    Attributes:
        name: module name.
        d_in: input features.
        d_out: output features.
        input_group: first layer that reads the same input.
        tokens: number of calibration tokens that it was profiled on.
        candidates: ways to store it.
        chosen: the chosen candidate; None before the allocation.
    """

    name: str
    d_in: int
    d_out: int
    input_group: str
    tokens: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None = None


class LayerList(Resource):
    """All layers profiled so far, in the order of the model."""

    data: tuple[Layer, ...]


class Artifact(Resource):
    """A file of a job.

    Attributes:
        name: its name; may contain `/`.
        size: size in bytes.
        sha256: hash of its content, hexadecimal.
        media_type: media type of its content.
        expires_at: when the server deletes it.
    """

    name: str
    size: int
    sha256: str
    media_type: str
    expires_at: datetime | None = None


class ArtifactList(Resource):
    """All files of a job."""

    data: tuple[Artifact, ...]


class Upload(Resource):
    """An uploaded calibration file.

    Attributes:
        id: `upload/ID`, as `submit` takes it.
        size: size in bytes.
        documents: number of documents in it.
        sha256: hash of its content, hexadecimal.
    """

    id: str
    size: int
    documents: int
    sha256: str


class Available(Resource):
    """Free memory and disk where jobs run.

    Attributes:
        memory_bytes: free memory of the CPU; None if unknown.
        disk_bytes: free disk space of the data folder.
    """

    memory_bytes: int | None
    disk_bytes: int


class Estimate(Resource):
    """Estimated cost of a job; see `POST /estimates`.

    Attributes:
        commit: commit that the revision refers to now; None for a local model.
        parameters: parameters of the whole model.
        stored_bytes: bytes of its weights.
        compressible_parameters: parameters of the layers that can be compressed.
        kept_parameters: upper bound on those that are left.
        factored_bytes: upper bound on the bytes of the factored artifact.
        nearest_ratio: the requested ratio, or the highest that is certain to be reachable.
        calibration_tokens: upper bound on the tokens that are read.
        memory_bytes: memory of the device that computes.
        disk_bytes: disk space for checkpoints and artifacts.
        available: free resources where jobs run; None where they run on other machines.
    """

    model_id: str
    commit: str | None = None
    parameters: int
    stored_bytes: int
    compressible_parameters: int
    kept_parameters: int
    factored_bytes: int
    ratio: float
    nearest_ratio: float
    calibration_tokens: int
    memory_bytes: int
    disk_bytes: int
    available: Available | None = None


class Named(Resource):
    """Something that the server offers by name."""

    id: str


class NamedList(Resource):
    """Everything of one kind that the server offers by name."""

    data: tuple[Named, ...]


class Profile(Resource):
    """Profile of a model, independent of a ratio.

    Attributes:
        id: id of the profile.
        model_id: the model, as named in the job that created the profile.
        calibration: the calibration data.
        options: settings of that job, by name.
        layers: number of profiled layers.
        reachable_ratio: the largest reachable ratio.
        created_at: when it was created.
        used_at: when a job last created or used it.
    """

    id: str
    model_id: str
    calibration: Calibration
    options: dict[str, JsonValue]
    layers: int
    reachable_ratio: float
    created_at: datetime
    used_at: datetime


class ProfilePage(Resource):
    """Some profiles, newest first.

    Attributes:
        data: the profiles.
        has_more: whether there are older ones.
        last_id: id to pass as `after` for the next page.
    """

    data: tuple[Profile, ...]
    has_more: bool
    last_id: str | None = None


class Size(Resource):
    """Predicted size and error of a model at one ratio.

    Attributes:
        ratio: fraction removed, in the budget unit.
        kept_parameters: compressible parameters that are left.
        stored_bytes: bytes of the compressible layers.
        model_bytes: bytes of all weights.
        error: predicted error, in the unit of the profile's objective.
    """

    ratio: float
    kept_parameters: int
    stored_bytes: int
    model_bytes: int
    error: float


class Frontier(Resource):
    """Predicted sizes and errors of a model at all ratios.

    Attributes:
        objective: measure of errors: `fisher` (nats per token), `whitened` or `weight`.
        budget: budget unit: parameters or bytes.
        compressible_parameters: parameters of the profiled layers before compression.
        dense_bytes: bytes of all weights before compression.
        data: the points, by rising ratio.
    """

    objective: str
    budget: str
    compressible_parameters: int
    dense_bytes: int
    data: tuple[Size, ...]


class LayerChoice(Resource):
    """Predicted choice for a layer.

    Attributes:
        name: module name.
        chosen: its candidate.
    """

    name: str
    chosen: Candidate


class PredictedAllocation(Size):
    """A predicted allocation.

    Attributes:
        budget: budget unit of `ratio`; bytes for a target size.
        proven: whether no other choice of candidates has less error.
        layers: the predicted choices, in the order of the model.
    """

    budget: str
    proven: bool
    layers: tuple[LayerChoice, ...]
