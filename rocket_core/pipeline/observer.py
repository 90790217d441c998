"""What the caller of a run is told, and how it ends one."""

from collections.abc import Sequence
from dataclasses import dataclass

from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import Stage
from rocket_core.report.healing import HealingPoint
from rocket_core.report.schema import StageReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        stage: the current stage.
        layer: the layer being processed; None between layers.
        fraction: fraction of the whole run, [0, 1], never decreasing.
        seconds_left: estimate from the speed so far; None while no estimate is possible.
    """

    stage: Stage
    layer: str | None
    fraction: float
    seconds_left: float | None


class Observer:
    """Observer of `compress`, `profile_model`, `heal` and `evaluate_artifact`; its methods do nothing.

    Subclasses override those that they need. An error that a method raises ends the run; finished work is kept.
    """

    def on_progress(self, progress: Progress) -> None:
        """Receive a step: at least one per layer, and several within a download or a calibration."""

    def on_requirements(self, memory_bytes: int) -> None:
        """Receive the run's estimated bytes of memory, before the work that needs them."""

    def on_warning(self, warning: str) -> None:
        """Receive, before long work, what the caller should know, such as that little of the model is selected."""

    def on_offline(self) -> None:
        """Note that everything from the Hub has been read; the network is not used after that."""

    def on_profile(self, position: int, profile: LayerProfile) -> None:
        """Receive a layer's position in the model and its profile, as soon as that is on disk.

        A resumed run reports those of the earlier one again.
        """

    def on_profiled(self, profile: ModelProfile) -> None:
        """Receive all profiles together, once the last one is complete."""

    def on_allocation(self, chosen: Sequence[tuple[str, Candidate]]) -> None:
        """Receive every layer's name and the candidate that the knapsack chose, in model order."""

    def on_healing(self, point: HealingPoint) -> None:
        """Receive a point of the loss curve of healing; a resumed run reports those of the earlier one again."""

    def on_costs(self, stages: tuple[StageReport, ...]) -> None:
        """Receive the cost of each stage at the end of `profile_model`, because a profile has no report."""

    def should_cancel(self) -> bool:
        """Return whether to end the run, which asks at every step; finished work is kept."""
        return False
