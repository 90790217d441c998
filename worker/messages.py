"""What a job's attempt and its processes tell each other.

====================  =====================================  ==============================================
from the attempt      from `worker.fetch`                    from `worker.compute`
====================  =====================================  ==============================================
`Confinement`
`FetchRequest`        `Downloading`, `Downloaded`, `Failed`
`ComputeRequest`                                             `Advanced`, `Failed`, `Finished`
`Acknowledged`                                               `Required`, `LayerProfiled`, `ModelProfiled`,
                                                             `Allocated`, `Costed`
====================  =====================================  ==============================================

A message that is acknowledged has been written to the database when the answer comes.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from app.shared.outcomes import JobError
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import CompressionConfig
from rocket_core.report.schema import StageReport
from worker.channel import Message

MAX_TEXT = 10_000
"""Longest message of an error."""

_Name = Annotated[str, Field(max_length=4096)]
_Share = Annotated[float, Field(ge=0, le=1)]
Task = Literal["compression", "profile"]
StageName = Literal[
    "downloading",
    "preflight",
    "differentiating",
    "calibrating",
    "allocating",
    "factorizing",
    "exporting",
    "evaluating",
]
"""As `rocket_core.pipeline.progress.Stage`, which loads torch; in the order in which a run passes them."""


class Logging(Message):
    """How a process writes its log.

    Attributes:
        level: least severe line logged.
        format: lines for people or for machines.
        fields: what every line says.
    """

    level: Literal["debug", "info", "warning", "error"]
    format: Literal["text", "json"]
    fields: dict[str, str]


class FetchRequest(Message):
    """Which model to download.

    Attributes:
        logging: how to log.
        model: repository id.
        revision: branch, tag or commit.
        config: the compression that the headers must allow.
        cache: folder to keep it in.
        quota_bytes: most bytes that models may take there; None is no limit.
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
    """What to compute.

    Attributes:
        logging: how to log.
        task: a compression, or a profile alone.
        model: what the user asked for: a repository id, or the path of a folder.
        folder: the model's files, of a model of the Hub; None where `model` is a folder.
        commit: commit of the repository.
        revision: what the user asked for.
        output: folder to write to.
        config: all settings.
        profiles: folder of kept profiles.
        profiles_bytes: disk that they may take.
        measure_energy: whether to measure energy.
        token: the Hub's token, where text or tasks come from there.
        download: what downloading the model has cost.
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
    """What was told is in the database.

    Attributes:
        memory_bytes: the memory limit from now on, in answer to `Required`; None leaves it.
    """

    memory_bytes: Annotated[int, Field(gt=0)] | None = None


class Downloading(Message):
    """More of the model has arrived.

    Attributes:
        share: part of all bytes.
    """

    kind: Literal["downloading"] = "downloading"
    share: _Share


class Downloaded(Message):
    """The model is here.

    Attributes:
        folder: its files.
        commit: commit of the repository.
        cost: what the download has cost.
    """

    kind: Literal["downloaded"] = "downloaded"
    folder: Path
    commit: Annotated[str, Field(min_length=1, max_length=256)]
    cost: StageReport


class Advanced(Message):
    """Where the run is; see `rocket_core.pipeline.Progress`."""

    kind: Literal["advanced"] = "advanced"
    stage: StageName
    layer: _Name | None
    fraction: _Share
    seconds_left: Annotated[float, Field(ge=0, le=10**9)] | None


class Required(Message):
    """What the run is estimated to need.

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
    """The candidates are chosen, by the names of their layers, in the order of the model."""

    kind: Literal["allocated"] = "allocated"
    chosen: tuple[tuple[_Name, Candidate], ...]


class Costed(Message):
    """What each stage has cost, where no report says so."""

    kind: Literal["costed"] = "costed"
    stages: tuple[StageReport, ...]


class Finished(Message):
    """All is done; of a compression the output folder holds the report."""

    kind: Literal["finished"] = "finished"


class Failed(Message):
    """The process gives up."""

    kind: Literal["failed"] = "failed"
    code: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=MAX_TEXT)]

    @classmethod
    def by(cls, error: JobError) -> "Failed":
        """Return the message for an error; stage and layer are known to the attempt."""
        return cls(code=error.code, message=error.message[:MAX_TEXT])


CANCELLED = Failed(code="cancelled", message="stopped when asked to")
"""The process has stopped because it was asked to."""

FETCH_REQUEST = TypeAdapter(FetchRequest)
COMPUTE_REQUEST = TypeAdapter(ComputeRequest)
ACKNOWLEDGED = TypeAdapter(Acknowledged)

FromFetch = Downloading | Downloaded | Failed
FROM_FETCH: TypeAdapter[FromFetch] = TypeAdapter(Annotated[FromFetch, Field(discriminator="kind")])

FromCompute = Advanced | Required | LayerProfiled | ModelProfiled | Allocated | Costed | Finished | Failed
FROM_COMPUTE: TypeAdapter[FromCompute] = TypeAdapter(Annotated[FromCompute, Field(discriminator="kind")])
