"""Results of healing, as they appear in reports. Loads no torch."""

from typing import Annotated

from pydantic import Field

from rocket_core.schema import FrozenModel

_Count = Annotated[int, Field(ge=1)]
_Divergence = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class HealingPoint(FrozenModel):
    """A point of the loss curve of healing."""

    step: Annotated[int, Field(ge=0)]
    """steps of the optimizer until then."""
    tokens: Annotated[int, Field(ge=0)]
    """tokens read until then."""
    training: _Divergence | None = None
    """divergence on the tokens read since the point before, in nats per token; None if only `held_out` was measured."""
    held_out: _Divergence | None = None
    """divergence on the held-out windows, in nats per token; None if it was not measured."""

    @property
    def order(self) -> tuple[int, bool]:
        """Place in the curve: after the tokens of a step come held-out windows, read with the values after it."""
        return self.tokens, self.training is None

    @property
    def text(self) -> str:
        """The point as one line for people."""
        measured = {"training": self.training, "held-out": self.held_out}
        values = (f"{what} divergence {value:.4f}" for what, value in measured.items() if value is not None)
        return f"{self.tokens:,} tokens, {', '.join(values)}"


class HealingReport(FrozenModel):
    """How an artifact was healed, and what that changed."""

    dataset: str
    """name of the text."""
    seed: int
    """seed of the choice and the order of windows."""
    sequence_length: _Count
    """tokens per window."""
    windows: _Count
    """distinct windows that were read; again if the tokens asked for are more than theirs."""
    held_out_windows: _Count
    """windows of the same text that no step read."""
    tokens: _Count
    """tokens that all steps read."""
    steps: _Count
    """steps of the optimizer."""
    learning_rate: Annotated[float, Field(ge=0)]
    """largest learning rate, as a part of the root mean square of each tensor's numbers."""
    trained_values: _Count
    """numbers that were trained; those outside the support of a sparse layer are not counted."""
    divergence_before: _Divergence
    """mean KL divergence from the dense model on the held-out windows before the first step, in nats per token."""
    divergence_after: _Divergence
    """the same with the values that were kept, as stored: those with the least divergence on these windows."""
    kept_step: Annotated[int, Field(ge=0)]
    """steps after which the values were those that were kept; 0 if no step made the artifact better there."""
    text_sha256: str
    """hash of all windows."""
    curve: tuple[HealingPoint, ...]
    """the loss curve, by tokens."""
