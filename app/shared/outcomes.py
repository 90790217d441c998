"""Results and events of a job: passed from the worker through the database to the API."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from rocket_core.schema import FrozenModel

EventLevel = Literal["info", "warning", "error"]


class JobError(FrozenModel):
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


class JobResult(FrozenModel):
    """The result of a job that has succeeded."""

    achieved_ratio: float
    """fraction of the compressible parameters removed, [0, 1)."""
    kept_parameters: Annotated[int, Field(ge=0)]
    """what remains of them."""
    compressible_parameters: Annotated[int, Field(ge=0)]
    """parameters of the selected linear layers."""
    stored_bytes: Annotated[int, Field(ge=0)]
    """bytes of all safetensors files of the smallest export."""
    dense_bytes: Annotated[int, Field(ge=0)]
    """bytes of all safetensors files of the original."""


class NewEvent(FrozenModel):
    """An event to append to a job."""

    type: str
    """kind of event: `status`, `stage`, `layer`, `message` ..."""
    message: str
    """one line for humans."""
    level: EventLevel = "info"
    """its severity."""
    data: dict[str, JsonValue] = Field(default_factory=dict)
    """the same for programs."""


class NewArtifact(FrozenModel):
    """A file that a job publishes."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    """its name for the client; may contain `/`."""
    storage_key: str
    """its key in the artifact store."""
    size: Annotated[int, Field(ge=0)]
    """size in bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """hash of its content, hexadecimal."""
    media_type: str = "application/octet-stream"
    """media type of its content."""
