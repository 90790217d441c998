"""Speed and memory of models measured together, as they appear in reports. Loads no torch."""

from statistics import median
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rocket_core.engines import current_name
from rocket_core.report.formatting import bytes_text
from rocket_core.schema import FrozenModel

Runtime = Literal["transformers", "llama.cpp"]
"""What runs a model in a measurement."""
Packing = Literal["default", "packed", "unpacked"]
"""How the layers of an artifact of this library are held in memory: as `rocket_core.hf` does by itself, or not."""

_Count = Annotated[int, Field(ge=1)]
_Rate = Annotated[float, Field(gt=0)]


class RoundTimes(FrozenModel):
    """What one model took in one round."""

    prompt_seconds: _Rate
    """time until the first token: the prompt is read and a token is chosen."""
    generation_seconds: _Rate
    """time from the first token to the last."""


class ModelSpeed(FrozenModel):
    """Size, memory and speed of one model."""

    name: Annotated[str, BeforeValidator(current_name)]
    """the model as it was given; in a job `original`, or the kind of the export."""
    form: Annotated[str, BeforeValidator(current_name)]
    """form of the weights: `dense`, `rocket`, `compressed-tensors`, `gguf`, or the `quant_method` of the folder."""
    runtime: Runtime
    """what ran it."""
    packing: Packing = "default"
    """how its layers were held in memory, if `form` is `rocket`."""
    device: str
    """device that it ran on."""
    dtype: str | None
    """dtype of the weights that are not compressed; None if llama.cpp ran it, whose files have their own types."""
    stored_bytes: _Count
    """bytes of all weights on disk: of the safetensors files, or of the GGUF file."""
    memory_bytes: Annotated[int, Field(ge=0)] | None
    """bytes that its process held after the last round and not before it loaded the model: weights, cache and buffers,
    in memory or on the accelerator. None if the system does not report it.
    """
    weights_bytes: Annotated[int, Field(ge=0)] | None = None
    """bytes of the weights as they are held while it runs. None if llama.cpp ran it, which maps them from the file, and
    in reports of earlier releases.
    """
    load_seconds: Annotated[float, Field(ge=0)]
    """time to load it, from a file that the system may have cached."""
    prompt_rate: _Rate
    """tokens of the prompt read per second, median of the rounds."""
    generation_rate: _Rate
    """tokens generated per second (batch 1), median of the rounds."""
    prompt_ratio: _Rate
    """its prompt rate divided by that of the first model in the same round, median of the rounds."""
    generation_ratio: _Rate
    """the same for generation."""


class UnmeasuredModel(FrozenModel):
    """A model that could not be measured."""

    name: Annotated[str, BeforeValidator(current_name)]
    """the model as it was given."""
    form: Annotated[str, BeforeValidator(current_name)]
    """form of the weights."""
    reason: str
    """what prevented it, and what to do."""


class SpeedReport(FrozenModel):
    """Models measured in turns in one run. Ratios are to the first of `models`."""

    prompt_tokens: _Count
    """tokens of the prompt, the same for all models."""
    new_tokens: Annotated[int, Field(ge=2)]
    """tokens that each model generated; the time of the first one belongs to the prompt."""
    rounds: _Count
    """rounds, in each of which every model was measured once, after a round that does not count."""
    threads: _Count
    """threads on the processor."""
    processor: str
    """name of the processor."""
    models: Annotated[tuple[ModelSpeed, ...], Field(min_length=1)]
    """what was measured, in the order given."""
    unmeasured: tuple[UnmeasuredModel, ...] = ()
    """models that could not be measured."""

    @model_validator(mode="after")
    def _first_is_the_reference(self) -> Self:
        if (self.models[0].prompt_ratio, self.models[0].generation_ratio) != (1, 1):
            raise ValueError("the first model is the one that the others are compared with: its ratios are 1")
        return self

    @property
    def conditions(self) -> str:
        """How it was measured, as a phrase."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return (
            f"prompt of {self.prompt_tokens} tokens, {self.new_tokens} tokens generated one at a time; "
            f"{threads} of {self.processor}; medians of {self.rounds} {'round' if self.rounds == 1 else 'rounds'}"
        )


SPEED_COLUMNS = ("model", "on disk", "in memory", "prompt, tokens/s", "generation, tokens/s", "runs with")
"""Names of the columns of `speed_rows`."""


def speed_rows(report: SpeedReport) -> list[tuple[str, ...]]:
    """Return a table with the columns `SPEED_COLUMNS`: figures, and in brackets their ratio to the first model's."""
    first = report.models[0]
    rows: list[tuple[str, ...]] = []
    for model in report.models:
        memory = "-"
        if model.memory_bytes is not None:
            memory = bytes_text(model.memory_bytes)
            if first.memory_bytes:
                memory += f" ({_ratio(model.memory_bytes / first.memory_bytes)})"
        rows.append(
            (
                model.name if model.packing == "default" else f"{model.name}, {model.packing}",
                f"{bytes_text(model.stored_bytes)} ({_ratio(model.stored_bytes / first.stored_bytes)})",
                memory,
                f"{rate_text(model.prompt_rate)} ({_ratio(model.prompt_ratio)})",
                f"{rate_text(model.generation_rate)} ({_ratio(model.generation_ratio)})",
                ", ".join(part for part in (model.runtime, model.dtype, model.device) if part is not None),
            )
        )
    return rows


def median_ratio(reference: list[float], other: list[float]) -> float:
    """Return the median over rounds of the reference's time divided by the other's: above 1 the other is faster.

    The ratio is taken within a round, because what else runs on the machine slows models that take turns alike.
    """
    return median(one / two for one, two in zip(reference, other, strict=True))


def rate_text(rate: float) -> str:
    """Return tokens per second with three digits, or in whole tokens from 100 on."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"
