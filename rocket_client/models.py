"""What the service answers, typed.

What a newer server adds is ignored, and a status may be one that this client has never heard of.
"""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, JsonValue


class Resource(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Calibration(Resource):
    """Which text a model is calibrated on.

    Attributes:
        dataset: `builtin`, a name of the Hub's datasets, or `local/FILE`.
        samples: windows of tokens.
        sequence_length: tokens per window; None takes what suits the model.
        seed: which windows are drawn.
    """

    dataset: str
    samples: int
    sequence_length: int | None = None
    seed: int


class Evaluation(Resource):
    """How a result is compared with the dense model.

    Attributes:
        dataset: as of a calibration.
        samples: windows of tokens.
        sequence_length: tokens per window; None takes what suits the model.
        stride: tokens from one window's begin to the next; None is the sequence length.
        tasks: zero-shot tasks.
        task_items: items of each task; None is all.
    """

    dataset: str
    samples: int
    sequence_length: int | None = None
    stride: int | None = None
    tasks: tuple[str, ...] = ()
    task_items: int | None = None


class JobError(Resource):
    """Why a job failed.

    Attributes:
        code: stable code of the kind of error.
        message: what, where and what to do.
        stage: stage in which it happened; None if it was none.
        layer: layer at which it happened; None if it was none.
        retryable: whether the same job may succeed later.
    """

    code: str
    message: str
    stage: str | None = None
    layer: str | None = None
    retryable: bool = False


class JobResult(Resource):
    """What a job achieved.

    Attributes:
        achieved_ratio: fraction of the compressible parameters removed, [0, 1).
        kept_parameters: what is left of them.
        compressible_parameters: parameters of the selected linear layers.
        stored_bytes: all safetensors of the smallest export.
        dense_bytes: all safetensors of the original.
    """

    achieved_ratio: float
    kept_parameters: int
    compressible_parameters: int
    stored_bytes: int
    dense_bytes: int


class Job(Resource):
    """A job.

    Attributes:
        id: its name.
        kind: `compression`, or `profile` for one that profiles layers and no more.
        status: queued, running, cancelling, succeeded, failed, cancelled, or a newer one.
        stage: what a running job does.
        progress: of the whole job, [0, 1].
        model_id: the model, as asked for.
        revision: branch, tag or commit of a repository.
        ratio: fraction of the compressible parameters to remove; None where a size is asked for, or a profile.
        target_bytes: most that the factored artifact may take; None where a ratio is asked for, or a profile.
        calibration: the calibration text.
        evaluate: how the result is compared with the dense model; None if it is not.
        options: settings of the method, by name.
        metadata: the client's own labels.
        created_at: when it was submitted.
        started_at: when a worker first took it.
        finished_at: when it ended.
        estimated_finish_at: when it should end.
        expires_at: when its artifacts are deleted; None unless it has succeeded.
        queue: which workers run it; None if the server has no queues.
        attempt: how often it has started.
        retry_of: the job that this one repeats.
        profile_id: what it knows of the model apart from the ratio, as `frontier` takes it; None before it has one, and
            once that is gone.
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
        """Whether nothing will change any more."""
        return self.finished_at is not None


class JobPage(Resource):
    """Some jobs, newest first.

    Attributes:
        data: the jobs.
        has_more: whether there are older ones.
        last_id: what to list `after` for these.
    """

    data: tuple[Job, ...]
    has_more: bool
    last_id: str | None = None


class Event(Resource):
    """Something that happened to a job.

    Attributes:
        id: counts from 1 without gaps.
        created_at: when.
        level: info, warning or error.
        type: what kind of thing: status, stage, layer, ...
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
    """Where a job is.

    Attributes:
        status: its status.
        stage: what it does.
        progress: of the whole job, [0, 1].
        estimated_finish_at: when it should end.
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
        nnz: nonzero coefficients or weights; None if dense.
        dictionary: layer whose dictionary it shares, itself if it owns a shared one; None if not shared.
        kept_parameters: what is left of the layer.
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
    """What profiling has found out about a layer.

    Attributes:
        name: module name.
        d_in: input features.
        d_out: output features.
        input_group: first layer that reads the same input.
        tokens: calibration tokens behind it.
        candidates: ways to store it.
        chosen: the one it got; None before the allocation.
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
        name: its name; may hold `/`.
        size: bytes.
        sha256: hash of its content, hexadecimal.
        media_type: what it is.
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
    """A calibration file of one's own.

    Attributes:
        id: `upload/ID`, as `submit` takes it.
        size: bytes.
        documents: how many it holds.
        sha256: hash of its content, hexadecimal.
    """

    id: str
    size: int
    documents: int
    sha256: str


class Available(Resource):
    """What is free where jobs run.

    Attributes:
        memory_bytes: memory of the CPU; None where the system does not say.
        disk_bytes: disk of the data folder.
    """

    memory_bytes: int | None
    disk_bytes: int


class Estimate(Resource):
    """What a job would take; see `POST /estimates`.

    Attributes:
        commit: what the revision names now; None for a local model.
        parameters: of the whole model.
        stored_bytes: of its weights.
        compressible_parameters: of the layers that can be compressed.
        kept_parameters: most that are left of them.
        factored_bytes: most that the factored artifact takes.
        nearest_ratio: the ratio asked for, or the highest that is certain to be reached.
        calibration_tokens: most that are read.
        memory_bytes: of the device that computes.
        disk_bytes: for checkpoints and artifacts.
        available: what is free where jobs run; None where they run on other machines.
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
    """All that the server offers by name."""

    data: tuple[Named, ...]


class Profile(Resource):
    """What is known of a model before a ratio is chosen.

    Attributes:
        id: its name.
        model_id: the model, as the job that made it named it.
        calibration: the calibration data.
        options: settings of that job, by name.
        layers: how many are profiled.
        reachable_ratio: the largest ratio that can be reached.
        created_at: when it was made.
        used_at: when a job last made or found it.
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
        last_id: what to list `after` for these.
    """

    data: tuple[Profile, ...]
    has_more: bool
    last_id: str | None = None


class Size(Resource):
    """A model at one ratio, as its profile predicts it.

    Attributes:
        ratio: fraction removed, of what the budget counts.
        kept_parameters: what is left of the compressible parameters.
        stored_bytes: of the compressible layers.
        model_bytes: of all weights.
        error: in the measure of the profile's objective.
    """

    ratio: float
    kept_parameters: int
    stored_bytes: int
    model_bytes: int
    error: float


class Frontier(Resource):
    """A model at all ratios.

    Attributes:
        objective: what errors are: `fisher` (nats per token), `whitened` or `weight`.
        budget: what ratios are fractions of: parameters or bytes.
        compressible_parameters: of the profiled layers as they are.
        dense_bytes: of all weights as they are.
        data: by rising ratio.
    """

    objective: str
    budget: str
    compressible_parameters: int
    dense_bytes: int
    data: tuple[Size, ...]


class LayerChoice(Resource):
    """What a layer would get.

    Attributes:
        name: module name.
        chosen: its candidate.
    """

    name: str
    chosen: Candidate


class PredictedAllocation(Size):
    """An allocation that nobody has carried out.

    Attributes:
        budget: what `ratio` is a fraction of; bytes where a size was asked for.
        proven: whether no other choice of candidates has less error.
        layers: what each would get, in the order of the model.
    """

    budget: str
    proven: bool
    layers: tuple[LayerChoice, ...]
