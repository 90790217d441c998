"""Messages between a run and the processes that work for it, as JSON."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from rocket_core.config import CompressionConfig
from rocket_core.pipeline.stages.units import CompressionUnit
from rocket_core.report.schema import StageReport
from rocket_core.schema import FrozenModel
from rocket_core.system.child_process import Failed


class Begin(FrozenModel):
    """The first request: prepare to work for a run."""

    name: str
    """name of the model."""
    folder: Path
    """folder of its files."""
    commit: str | None
    """commit of its repository."""
    config: CompressionConfig
    """settings of the run, with the device of this process."""
    work: Path
    """work folder, which the run has claimed."""
    threads: Annotated[int, Field(ge=1)]
    """threads on the processor; results are equal to the byte for equal numbers."""


class ProfileBlocks(FrozenModel):
    """Request: profile blocks until no free one is left."""

    kind: Literal["profile"] = "profile"


class CompressBlocks(FrozenModel):
    """Request: compress blocks until no free one is left."""

    kind: Literal["compress"] = "compress"
    units: tuple[CompressionUnit, ...]
    """what is compressed, in model order."""
    left: int | None
    """bytes of the budget that the allocation left for entropy-coded layers."""


class Ready(FrozenModel):
    """Answer to the first request: the process has read the model, and will look for blocks."""


class Finished(FrozenModel):
    """Answer to a request for blocks: none is left."""

    cost: StageReport
    """what it took."""


Request: TypeAlias = ProfileBlocks | CompressBlocks


class Offer(FrozenModel):
    """What a run offers, in its work folder, to processes that it has not started; see `offers`."""

    config: CompressionConfig
    """settings of the run, with its own device."""
    threads: Annotated[int, Field(ge=1)]
    """threads on the processor, as in `Begin`."""
    request: Annotated[Request, Field(discriminator="kind")] | None
    """the work on blocks in progress; None between two such stages."""


REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
"""Any of the requests after the first."""
ANSWER: TypeAdapter[Ready | Finished | Failed] = TypeAdapter(Ready | Finished | Failed)
"""Any answer; they differ in their fields."""
