"""Progress and cancellation of a run."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from rocket_core.config import Stage, stage_label
from rocket_core.errors import CompressionCancelledError
from rocket_core.pipeline.observer import Observer, Progress
from rocket_core.pipeline.stage_costs import Costs
from rocket_core.system.process_memory import return_freed_memory

# Share of a run's time by stage, measured on a 20 M parameter model; only the progress bar depends on it.
_SHARES: dict[Stage, float] = {
    # Only for a model on the Hub; with a local one the run starts after this stage.
    "downloading": 0.05,
    "preflight": 0.03,
    # Only with the objective fisher.
    "differentiating": 0.05,
    "calibrating": 0.67,
    "allocating": 0.01,
    "factorizing": 0.14,
    # Only if requested; in a compression its share depends on the tokens.
    "healing": 1.0,
    "exporting": 0.05,
    # Only if an evaluation is requested; added to the others.
    "evaluating": 0.25,
    # Only if a benchmark is requested; the same.
    "benchmarking": 0.15,
}
# Times that the share of factorizing grows if blocks are refined.
_REFINED_SHARE = 5.0
# Share of healing on as many tokens as the calibration has: four passes forward, of which `differentiating` takes three
# on an eighth of them.
_HEALING_PASS_SHARE = 0.6


class Monitor:
    """Reporter of progress and results, which also ends a cancelled run and sums the cost of each stage.

    Args:
        observer: the caller's; also available as `observer`.
        costs: costs to which stages are charged; also available as `costs`.
        stages: stages that the run has.
        refines: whether blocks are refined.
        healing_passes: tokens that healing reads, in multiples of those of the calibration; None without calibration.
    """

    def __init__(
        self,
        observer: Observer,
        costs: Costs,
        *,
        stages: Collection[Stage],
        refines: bool = False,
        healing_passes: float | None = None,
    ) -> None:
        played = {stage: share for stage, share in _SHARES.items() if stage in stages}
        if refines and "factorizing" in played:
            played["factorizing"] *= _REFINED_SHARE
        if healing_passes is not None and "healing" in played:
            played["healing"] = _HEALING_PASS_SHARE * healing_passes
        total = sum(played.values())
        self._shares = {stage: share / total for stage, share in played.items()}
        self.observer = observer
        self.costs = costs
        self._expected: frozenset[Stage] = frozenset()
        self._anchor: tuple[float, float] | None = None
        self._fraction = 0.0
        self._rounds = 0
        self._stage: Stage = "downloading"
        self._last: Progress | None = None
        self._reported_at = 0.0

    def begin_round(self) -> None:
        """Let the stages from allocating on count as half of what is left of the run, as they may be repeated."""
        self._rounds += 1

    def expect(self, seconds: Mapping[Stage, float]) -> None:
        """Divide the parts that stages have of the run by their expected seconds; other stages keep theirs."""
        known = {stage: max(expected, 0.0) for stage, expected in seconds.items() if stage in self._shares}
        self._expected = frozenset(known)
        whole = sum(known.values())
        if whole > 0:
            part = sum(self._shares[stage] for stage in known)
            self._shares |= {stage: part * expected / whole for stage, expected in known.items()}

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Charge the block to a stage, even if it is interrupted, and return the memory that it has freed."""
        if self._stage in {"downloading", "preflight"} or (stage == "healing" and stage not in self._expected):
            # The time of earlier stages says nothing about the speed of later ones, whose shares are only guessed.
            self._anchor = None
        self._stage = stage
        self.step(0.0)
        with self.costs.of(stage):
            yield
            return_freed_memory()

    def step(self, share: float, layer: str | None = None) -> None:
        """Report a step.

        Args:
            share: completed part of the current stage, [0, 1].
            layer: the next layer.

        Raises:
            CompressionCancelledError: the caller has cancelled the run.
        """
        self.check()
        self.costs.save_if_due()
        done = self._before(self._stage) + share * self._shares[self._stage]
        if self._rounds:
            repeated = self._before("allocating")
            done = 1 - (1 - repeated) * 0.5**self._rounds * (2 - (done - repeated) / (1 - repeated))
        self._fraction = max(self._fraction, min(1.0, done))
        self._last = Progress(
            stage=self._stage, layer=layer, fraction=self._fraction, seconds_left=self._seconds_left()
        )
        self._reported_at = time.monotonic()
        self.observer.on_progress(self._last)

    def pulse(self) -> None:
        """Report within a step that the run is alive, with an updated estimate, and check for cancellation.

        Raises:
            CompressionCancelledError: the caller has cancelled the run.
        """
        self.check()
        self.costs.save_if_due()
        if self._last is None:
            return
        left = self._last.seconds_left
        if left is not None:
            left = max(0.0, left - (time.monotonic() - self._reported_at))
        self.observer.on_progress(replace(self._last, seconds_left=left))

    def check(self) -> None:
        """Raise an error if the caller has cancelled the run.

        Raises:
            CompressionCancelledError: the caller has cancelled the run.
        """
        if self.observer.should_cancel():
            raise CompressionCancelledError(
                f"cancelled while {stage_label(self._stage)}; what is finished is kept; resume to continue from there"
            )

    def skip_to(self, share: float) -> None:
        """Skip work of an earlier run, which says nothing about the speed of this one."""
        self.step(share)
        self._anchor = self._fraction, time.monotonic()

    def finish(self) -> None:
        """Report the end of the run."""
        self.observer.on_progress(Progress(stage=self._stage, layer=None, fraction=1.0, seconds_left=0.0))

    def _before(self, stage: Stage) -> float:
        stages = list(self._shares)
        return sum(self._shares[earlier] for earlier in stages[: stages.index(stage)])

    def _seconds_left(self) -> float | None:
        if self._anchor is None:
            self._anchor = self._fraction, time.monotonic()
        fraction, began = self._anchor
        if self._fraction <= fraction:
            return None
        return (time.monotonic() - began) / (self._fraction - fraction) * (1 - self._fraction)
