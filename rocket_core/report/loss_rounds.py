"""The sizes that were tried to meet a bound on the measured loss, as they appear in reports. Loads no torch."""

from typing import Annotated

from pydantic import Field

from rocket_core.schema import FrozenModel


class LossRound(FrozenModel):
    """One size that was tried."""

    sought: Annotated[float, Field(ge=0)]
    """upper bound on the predicted increase of the loss that layers were allocated for, in nats per token."""
    predicted: Annotated[float, Field(ge=0)]
    """predicted increase of the loss, in nats per token."""
    measured: float
    """what was measured, in nats per token: the KL divergence, or the increase of the loss."""
    stored_bytes: Annotated[int, Field(ge=0)]
    """bytes of the weights' files."""

    @property
    def text(self) -> str:
        """The round in words."""
        return (
            f"{self.stored_bytes:,} bytes: {self.measured:.3g} nats per token measured, {self.predicted:.3g} predicted"
        )
