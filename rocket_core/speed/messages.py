"""Messages between a run and the process of one model, as JSON."""

from typing import Annotated

from pydantic import Field, TypeAdapter

from rocket_core.report.speed import RoundTimes
from rocket_core.schema import FrozenModel
from rocket_core.speed.subjects import Subject
from rocket_core.system.child_process import Failed


class Load(FrozenModel):
    """The first request: load a model."""

    subject: Subject
    """the model."""
    device: str
    """device to run on."""
    threads: Annotated[int, Field(ge=1)]
    """threads on the processor."""
    context: Annotated[int, Field(ge=1)]
    """tokens of prompt and answer together."""


class Measure(FrozenModel):
    """A later request: read a prompt and generate, once."""

    prompt: Annotated[tuple[int, ...], Field(min_length=1)]
    """tokens of the prompt."""
    new_tokens: Annotated[int, Field(ge=2)]
    """tokens to generate."""


class Continue(FrozenModel):
    """A later request: continue a text greedily."""

    text: str
    """text to split into tokens."""
    prompt: Annotated[tuple[int, ...], Field(min_length=1)]
    """tokens of the prompt."""
    new_tokens: Annotated[int, Field(ge=1)]
    """tokens to generate."""


class Likeliest(FrozenModel):
    """The likeliest tokens at a place."""

    tokens: tuple[int, ...]
    """the tokens, the likeliest first."""
    log_probabilities: tuple[float, ...]
    """logarithms of their probabilities."""


class Continued(FrozenModel):
    """Answer to `Continue`."""

    split: tuple[int, ...]
    """tokens of the text."""
    places: tuple[Likeliest, ...]
    """what was predicted at each place."""


class Loaded(FrozenModel):
    """Answer to `Load`."""

    vocabulary: Annotated[int, Field(ge=1)]
    """number of tokens that it knows."""
    positions: int | None
    """longest context; None if the model does not say."""
    device: str
    """device that it runs on."""
    dtype: str | None
    """dtype of the weights; None for a GGUF file."""
    seconds: Annotated[float, Field(ge=0)]
    """time to load it."""


class Measured(FrozenModel):
    """Answer to `Measure`."""

    times: RoundTimes
    """what it took."""
    memory_bytes: int | None
    """bytes held now and not before the model was loaded; None if the system does not report it."""
    weights_bytes: int | None
    """bytes of the weights as the model holds them; None if they are not known."""


ANSWER: TypeAdapter[Loaded | Measured | Continued | Failed] = TypeAdapter(Loaded | Measured | Continued | Failed)
"""Any of the answers, which differ in their fields."""
