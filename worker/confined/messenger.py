"""Observer that sends what it is told to the attempt; importing it imports torch."""

import math
from collections.abc import Callable, Sequence

from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.pipeline import Observer, Progress
from rocket_core.report.healing import HealingPoint
from rocket_core.report.schema import StageReport
from worker.confined.messages import (
    ACKNOWLEDGED,
    Advanced,
    Allocated,
    Costed,
    Healed,
    LayerProfiled,
    ModelProfiled,
    Required,
)
from worker.processes.channel import Channel, Message

_MAX_SECONDS = 1e9


class Messenger(Observer):
    """Observer of one run.

    Args:
        channel: connection to the attempt.
        should_cancel: called at every step; True ends the run.
        close_network: called when the Hub is no longer needed.
    """

    def __init__(
        self, channel: Channel, *, should_cancel: Callable[[], bool], close_network: Callable[[], object]
    ) -> None:
        self._channel = channel
        self._should_cancel = should_cancel
        self._close_network = close_network

    def insist(self, message: Message) -> None:
        """Send a message and wait until it is in the database."""
        self._channel.send(message)
        self._channel.receive(ACKNOWLEDGED)

    def on_progress(self, progress: Progress) -> None:
        """Send the step, without waiting."""
        left = progress.seconds_left
        if left is not None:
            left = min(left, _MAX_SECONDS) if math.isfinite(left) else None
        self._channel.send(
            Advanced(stage=progress.stage, layer=progress.layer, fraction=progress.fraction, seconds_left=left)
        )

    def on_requirements(self, memory_bytes: int) -> None:
        """Send the estimate, and wait until the limits are set."""
        self.insist(Required(memory_bytes=memory_bytes))

    def on_offline(self) -> None:
        """Close the network."""
        self._close_network()

    def on_profile(self, position: int, profile: LayerProfile) -> None:
        """Send a layer's profile."""
        self.insist(LayerProfiled(position=position, profile=profile))

    def on_profiled(self, profile: ModelProfile) -> None:
        """Send all profiles."""
        self.insist(ModelProfiled(profile=profile))

    def on_allocation(self, chosen: Sequence[tuple[str, Candidate]]) -> None:
        """Send the allocation."""
        self.insist(Allocated(chosen=tuple(chosen)))

    def on_healing(self, point: HealingPoint) -> None:
        """Send a point of the loss curve."""
        self.insist(Healed(point=point))

    def on_costs(self, stages: tuple[StageReport, ...]) -> None:
        """Send the costs."""
        self.insist(Costed(stages=stages))

    def should_cancel(self) -> bool:
        """Return whether the attempt has asked to stop."""
        return self._should_cancel()
