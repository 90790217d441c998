"""Results and events of a job: passed from the worker through the database to the API."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from rocket_client import models as contract
from rocket_core.schema import FrozenModel

EventLevel = Literal["info", "warning", "error"]


class JobError(contract.JobError, extra="forbid"):
    """The error of a failed job."""


class JobResult(contract.JobResult, extra="forbid"):
    """The result of a job that has succeeded."""


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
