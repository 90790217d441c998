"""Results and events of a job: passed from the worker through the database to the API."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rocket_core.schema import described

EventLevel = Literal["info", "warning", "error"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=described)


class JobError(_Frozen):
    """The error of a failed job.

    Attributes:
        code: stable code of the error's class.
        message: what is wrong, where, and what to do.
        stage: stage in which it happened; None if it was in none.
        layer: layer at which it happened; None if it was at none.
        retryable: whether the same job may succeed later.
    """

    code: str
    message: str
    stage: str | None = None
    layer: str | None = None
    retryable: bool = False


class JobResult(_Frozen):
    """The result of a job that has succeeded.

    Attributes:
        achieved_ratio: fraction of the compressible parameters removed, [0, 1).
        kept_parameters: what remains of them.
        compressible_parameters: parameters of the selected linear layers.
        stored_bytes: bytes of all safetensors files of the smallest export.
        dense_bytes: bytes of all safetensors files of the original.
    """

    achieved_ratio: float
    kept_parameters: Annotated[int, Field(ge=0)]
    compressible_parameters: Annotated[int, Field(ge=0)]
    stored_bytes: Annotated[int, Field(ge=0)]
    dense_bytes: Annotated[int, Field(ge=0)]


class NewEvent(_Frozen):
    """An event to append to a job.

    Attributes:
        type: kind of event: `status`, `stage`, `layer`, `message` ...
        message: one line for humans.
        level: its severity.
        data: the same for programs.
    """

    type: str
    message: str
    level: EventLevel = "info"
    data: dict[str, JsonValue] = Field(default_factory=dict)


class NewArtifact(_Frozen):
    """A file that a job publishes.

    Attributes:
        name: its name for the client; may contain `/`.
        storage_key: its key in the artifact store.
        size: size in bytes.
        sha256: hash of its content, hexadecimal.
        media_type: media type of its content.
    """

    name: Annotated[str, Field(min_length=1, max_length=512)]
    storage_key: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    media_type: str = "application/octet-stream"
