"""Messages between a job's attempt and its processes.

====================  =====================================  ==============================================
from the attempt      from `worker.fetch`                    from `worker.compute`
====================  =====================================  ==============================================
`Confinement`
`FetchRequest`        `Downloading`, `Downloaded`, `Failed`
`ComputeRequest`                                             `Advanced`, `Failed`, `Finished`
`Acknowledged`                                               `Required`, `LayerProfiled`, `ModelProfiled`,
                                                             `Allocated`, `Costed`
====================  =====================================  ==============================================

An acknowledged message has been written to the database by the time the answer arrives.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from app.shared.outcomes import JobError
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import CompressionConfig, Stage
from rocket_core.report.schema import StageReport
from worker.channel import Message

MAX_TEXT = 10_000
"""Length of the longest error message."""

_Name = Annotated[str, Field(max_length=4096)]
_Share = Annotated[float, Field(ge=0, le=1)]
Task = Literal["compression", "profile"]


class Logging(Message):
    """Log settings of a process.

    Attributes:
        level: level of the least severe lines that are logged.
        format: lines for people or for machines.
        fields: fields of every line.
    """

    level: Literal["debug", "info", "warning", "error"]
    format: Literal["text", "json"]
    fields: dict[str, str]


class FetchRequest(Message):
    """Request for a download of a model.

    Attributes:
        logging: how to log.
        model: repository id.
        revision: branch, tag or commit.
        config: compression that the model's headers must allow.
        cache: folder to keep the model in.
        quota_bytes: most bytes that models may take there; None means no limit.
        token: the Hub's token.
        measure_energy: whether to measure energy.
    """

    logging: Logging
    model: str
    revision: str | None
    config: CompressionConfig
    cache: Path
    quota_bytes: int | None
    token: Annotated[str | None, Field(repr=False)]
    measure_energy: bool


class ComputeRequest(Message):
    """Request for a computation.

    Attributes:
        logging: how to log.
        task: a compression, or only a profile.
        model: the requested model: a repository id, or the path of a folder.
        folder: files of a model from the Hub; None where `model` is a folder.
        commit: commit of the repository.
        revision: the requested revision.
        output: folder to write to.
        config: all settings.
        profiles: folder of cached profiles.
        profiles_bytes: most bytes that cached profiles may take.
        measure_energy: whether to measure energy.
        token: the Hub's token, where text or tasks come from there.
        download: cost of downloading the model.
    """

    logging: Logging
    task: Task
    model: str
    folder: Path | None
    commit: str | None
    revision: str | None
    output: Path
    config: CompressionConfig
    profiles: Path
    profiles_bytes: int
    measure_energy: bool
    token: Annotated[str | None, Field(repr=False)]
    download: StageReport | None


class Acknowledged(Message):
    """A message has been written to the database.

    Attributes:
        memory_bytes: the new memory limit, in answer to `Required`; None leaves it unchanged.
    """

    memory_bytes: Annotated[int, Field(gt=0)] | None = None


class Downloading(Message):
    """More of the model has arrived.

    Attributes:
        share: fraction of all bytes.
    """

    kind: Literal["downloading"] = "downloading"
    share: _Share


class Downloaded(Message):
    """The model is downloaded.

    Attributes:
        folder: its files.
        commit: commit of the repository.
        cost: cost of the download.
    """

    kind: Literal["downloaded"] = "downloaded"
    folder: Path
    commit: Annotated[str, Field(min_length=1, max_length=256)]
    cost: StageReport


class Advanced(Message):
    """Progress of the run; see `rocket_core.pipeline.Progress`."""

    kind: Literal["advanced"] = "advanced"
    stage: Stage
    layer: _Name | None
    fraction: _Share
    seconds_left: Annotated[float, Field(ge=0, le=10**9)] | None


class Required(Message):
    """Estimated requirements of the run.

    Attributes:
        memory_bytes: memory.
    """

    kind: Literal["required"] = "required"
    memory_bytes: Annotated[int, Field(ge=0, lt=2**63)]


class LayerProfiled(Message):
    """A layer is profiled.

    Attributes:
        position: its place in the model.
        profile: its candidates.
    """

    kind: Literal["layer_profiled"] = "layer_profiled"
    position: Annotated[int, Field(ge=0, lt=2**18)]
    profile: LayerProfile


class ModelProfiled(Message):
    """All layers are profiled."""

    kind: Literal["model_profiled"] = "model_profiled"
    profile: ModelProfile


class Allocated(Message):
    """The chosen candidates with the names of their layers, in the order of the model."""

    kind: Literal["allocated"] = "allocated"
    chosen: tuple[tuple[_Name, Candidate], ...]


class Costed(Message):
    """Cost of each stage, for a run without a report."""

    kind: Literal["costed"] = "costed"
    stages: tuple[StageReport, ...]


class Finished(Message):
    """The run is complete; after a compression the output folder holds the report."""

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
COMPUTE_REQUEST = TypeAdapter(ComputeRequest)
ACKNOWLEDGED = TypeAdapter(Acknowledged)

FromFetch = Downloading | Downloaded | Failed
FROM_FETCH: TypeAdapter[FromFetch] = TypeAdapter(Annotated[FromFetch, Field(discriminator="kind")])

FromCompute = Advanced | Required | LayerProfiled | ModelProfiled | Allocated | Costed | Finished | Failed
FROM_COMPUTE: TypeAdapter[FromCompute] = TypeAdapter(Annotated[FromCompute, Field(discriminator="kind")])
