"""Messages between a job's attempt and its processes.

================  ==========================================================  ==================================
from the attempt  from `worker.confined.fetch` and `worker.confined.push`     from `worker.confined.compute`
================  ==========================================================  ==================================
`Confinement`
`FetchRequest`    `Transferred`, `Downloaded`, `Failed`
`UploadRequest`   `Transferred`, `Uploaded`, `Failed`
`ComputeRequest`                                                              `Advanced`, `Failed`, `Finished`
`Acknowledged`                                                                `Required`, `LayerProfiled`,
                                                                              `ModelProfiled`, `Allocated`,
                                                                              `Healed`, `Costed`, `Evaluated`
================  ==========================================================  ==================================

An acknowledged message has been written to the database by the time the answer arrives.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from app.shared.outcomes import JobError
from app.shared.requests import JobKind
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import CompressionConfig, Stage
from rocket_core.engines import LaterExport
from rocket_core.report.healing import HealingPoint
from rocket_core.report.push import PushReport
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import StageReport
from worker.processes.channel import Message

MAX_TEXT = 10_000
"""Length of the longest error message."""

LogLevel = Literal["debug", "info", "warning", "error"]
Task = JobKind | Literal["help"]
_Name = Annotated[str, Field(max_length=4096)]
_Share = Annotated[float, Field(ge=0, le=1)]


class WorkRequest(Message):
    """Request to a confined process."""

    log_level: LogLevel
    """level of the least severe lines that it logs."""
    token: Annotated[str | None, Field(repr=False)]
    """the Hub's token; None for anonymous access, or none at all."""


class FetchRequest(WorkRequest):
    """Request for a download of a model."""

    model: str
    revision: str | None
    config: CompressionConfig
    """compression that the model's headers must allow."""
    cache: Path
    """folder to keep the model in."""
    quota_bytes: int | None
    """most bytes that models may take there; None means no limit."""
    measure_energy: bool


class UploadRequest(WorkRequest):
    """Request for a push of an artifact to the Hub."""

    folder: Path
    """folder of the artifact, in a folder with the names of exports."""
    repository: str
    """the repository, `namespace/name`."""
    private: bool
    """whether it must be private."""
    message: str
    """commit message."""
    token: Annotated[str, Field(repr=False)]
    """the Hub's token, which a push must have."""


class ComputeRequest(WorkRequest):
    """Request for a computation; its token is for text or tasks that come from the Hub."""

    task: Task
    """a compression, only a profile, or the healing, evaluation or export of an artifact; or blocks of a compression or
    profile that another worker runs."""
    model: str
    """the requested model: a repository id, or the path of a folder."""
    folder: Path | None
    """files of a model from the Hub; None where `model` is a folder."""
    commit: str | None
    """commit of the repository."""
    revision: str | None
    """the requested revision."""
    output: Path
    """folder to write to."""
    config: CompressionConfig
    """all settings."""
    artifact: Path | None = None
    """folder of the artifact to heal, evaluate or export; None for other tasks."""
    export_to: LaterExport | None = None
    """format to export it to; None for other tasks."""
    profiles: Path
    """folder of cached profiles."""
    profiles_bytes: int
    """most bytes that cached profiles may take."""
    measure_energy: bool
    download: StageReport | None
    """cost of downloading the model."""


class Acknowledged(Message):
    """A message has been written to the database, or the limits of the process have been raised."""


class Transferred(Message):
    """More of the model has arrived, or more of the artifact has been sent."""

    kind: Literal["transferred"] = "transferred"
    share: _Share
    """fraction of all bytes."""


class Downloaded(Message):
    """The model is downloaded."""

    kind: Literal["downloaded"] = "downloaded"
    folder: Path
    commit: Annotated[str, Field(min_length=1, max_length=256)]
    """commit of the repository."""
    cost: StageReport


class Uploaded(Message):
    """The artifact is in the repository."""

    kind: Literal["uploaded"] = "uploaded"
    report: PushReport


class Advanced(Message):
    """Progress of the run; see `rocket_core.pipeline.Progress`."""

    kind: Literal["advanced"] = "advanced"
    stage: Stage
    layer: _Name | None
    fraction: _Share
    seconds_left: Annotated[float, Field(ge=0, le=10**9)] | None


class Required(Message):
    """Estimated requirements of the run; once, before weights are read."""

    kind: Literal["required"] = "required"
    memory_bytes: Annotated[int, Field(ge=0, lt=2**63)]


class LayerProfiled(Message):
    """A layer is profiled."""

    kind: Literal["layer_profiled"] = "layer_profiled"
    position: Annotated[int, Field(ge=0, lt=2**18)]
    """its place in the model."""
    profile: LayerProfile


class ModelProfiled(Message):
    """All layers are profiled."""

    kind: Literal["model_profiled"] = "model_profiled"
    profile: ModelProfile


class Allocated(Message):
    """The chosen candidates with the names of their layers, in the order of the model."""

    kind: Literal["allocated"] = "allocated"
    chosen: tuple[tuple[_Name, Candidate], ...]


class Healed(Message):
    """A point of the loss curve of healing."""

    kind: Literal["healed"] = "healed"
    point: HealingPoint


class Costed(Message):
    """Cost of each stage, for a run without a report."""

    kind: Literal["costed"] = "costed"
    stages: tuple[StageReport, ...]


class Evaluated(Message):
    """The artifact is evaluated."""

    kind: Literal["evaluated"] = "evaluated"
    report: EvaluationReport


class Finished(Message):
    """The run is complete; unless it only profiles, the output folder holds the report."""

    kind: Literal["finished"] = "finished"


class Failed(Message):
    """The process failed."""

    kind: Literal["failed"] = "failed"
    code: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=MAX_TEXT)]

    @classmethod
    def by(cls, error: JobError) -> "Failed":
        """Return the message for an error, without stage and layer, which the attempt knows."""
        return cls(code=error.code, message=error.message[:MAX_TEXT])


CANCELLED = Failed(code="cancelled", message="stopped when asked to")
"""The process stopped because it was asked to."""

FETCH_REQUEST = TypeAdapter(FetchRequest)
UPLOAD_REQUEST = TypeAdapter(UploadRequest)
COMPUTE_REQUEST = TypeAdapter(ComputeRequest)
ACKNOWLEDGED = TypeAdapter(Acknowledged)

FromFetch = Transferred | Downloaded | Failed
FROM_FETCH: TypeAdapter[FromFetch] = TypeAdapter(Annotated[FromFetch, Field(discriminator="kind")])

FromPush = Transferred | Uploaded | Failed
FROM_PUSH: TypeAdapter[FromPush] = TypeAdapter(Annotated[FromPush, Field(discriminator="kind")])

FromCompute = (
    Advanced | Required | LayerProfiled | ModelProfiled | Allocated | Healed | Costed | Evaluated | Finished | Failed
)
FROM_COMPUTE: TypeAdapter[FromCompute] = TypeAdapter(Annotated[FromCompute, Field(discriminator="kind")])
