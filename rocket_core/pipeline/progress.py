"""Progress, cancellation and cost of a run."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.devices import device_name, peak_memory, reset_peak_memory
from rocket_core.energy import EnergyMeter, EnergyReading
from rocket_core.errors import CompressionCancelledError
from rocket_core.model_profile import ModelProfile
from rocket_core.report import StageEnergy, StageReport

Stage = Literal[
    "downloading",
    "preflight",
    "differentiating",
    "calibrating",
    "allocating",
    "factorizing",
    "exporting",
    "evaluating",
]

# Share of a run's time by stage, measured on a 20 M parameter model; only the progress bar depends on it.
_SHARES: dict[Stage, float] = {
    # Of a model on the Hub; a local one begins behind it.
    "downloading": 0.05,
    "preflight": 0.03,
    # Of objective fisher only.
    "differentiating": 0.05,
    "calibrating": 0.67,
    "allocating": 0.01,
    "factorizing": 0.14,
    "exporting": 0.05,
    # Beside the others, where an evaluation is asked for.
    "evaluating": 0.25,
}
# A hundredth of a joule.
_KWH_DIGITS = 11
_BEHIND_PROFILES: frozenset[Stage] = frozenset({"allocating", "factorizing", "exporting", "evaluating"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is.

    Attributes:
        stage: downloading (only of a model on the Hub), preflight, calibrating, allocating, factorizing, exporting, or
            evaluating (only where asked for).
        layer: the layer being worked on; None between layers.
        fraction: of the whole run, [0, 1], never falling.
        seconds_left: estimate from the speed so far; None while there is nothing to go by.
    """

    stage: Stage
    layer: str | None
    fraction: float
    seconds_left: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """What the caller of `compress` or `profile_model` wants to hear and say; see there."""

    on_progress: Callable[[Progress], None]
    on_profile: Callable[[int, LayerProfile], None]
    on_profiled: Callable[[ModelProfile], None] = lambda _profile: None
    on_allocation: Callable[[Sequence[tuple[str, Candidate]]], None] = lambda _chosen: None
    should_cancel: Callable[[], bool]


class Monitor:
    """Reports progress and results, ends a cancelled run, and adds up what each stage costs.

    Args:
        callbacks: the caller's.
        device: device that computes.
        earlier: costs of the stages in runs that this one resumes.
        evaluates: whether an evaluation follows.
        compresses: whether anything follows upon the profiles.
        meter: measures the energy; None leaves it out.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        device: torch.device,
        earlier: dict[str, StageReport],
        *,
        evaluates: bool = False,
        compresses: bool = True,
        meter: EnergyMeter | None = None,
    ) -> None:
        left_out = set() if evaluates else {"evaluating"}
        if not compresses:
            left_out |= _BEHIND_PROFILES
        played = {stage: share for stage, share in _SHARES.items() if stage not in left_out}
        whole = sum(played.values())
        self._shares = {stage: share / whole for stage, share in played.items()}
        self._callbacks = callbacks
        self._device = device
        self._device_name = device_name(device)
        self._meter = meter
        self._costs = dict(earlier)
        self._anchor: tuple[float, float] | None = None
        self._fraction = 0.0
        self._stage: Stage = "downloading"
        self._last: Progress | None = None
        self._told_at = 0.0

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """Cost of each stage so far."""
        return tuple(self._costs.values())

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Times a stage; a stage that is cut short is counted too."""
        if self._stage in {"downloading", "preflight"}:
            # Their time says nothing about the speed of what follows.
            self._anchor = None
        self._stage = stage
        self.step(0.0)
        _reset_peak(self._device)
        energy = self._energy()
        began = time.monotonic()
        try:
            yield
        finally:
            self._charge(stage, time.monotonic() - began, energy)

    def step(self, share: float, layer: str | None = None) -> None:
        """Reports a step.

        Args:
            share: part of the current stage that is done, [0, 1].
            layer: the layer that comes next.

        Raises:
            CompressionCancelledError: the caller wants the run to end.
        """
        self.check()
        stages = list(self._shares)
        before = sum(self._shares[stage] for stage in stages[: stages.index(self._stage)])
        self._fraction = max(self._fraction, min(1.0, before + share * self._shares[self._stage]))
        self._last = Progress(
            stage=self._stage, layer=layer, fraction=self._fraction, seconds_left=self._seconds_left()
        )
        self._told_at = time.monotonic()
        self._callbacks.on_progress(self._last)

    def pulse(self) -> None:
        """Says inside a step that the run goes on, for whoever waits for steps and those who want it to end.

        Raises:
            CompressionCancelledError: the caller wants the run to end.
        """
        self.check()
        if self._last is None:
            return
        left = self._last.seconds_left
        if left is not None:
            left = max(0.0, left - (time.monotonic() - self._told_at))
        self._callbacks.on_progress(replace(self._last, seconds_left=left))

    def check(self) -> None:
        """Ends the run if the caller wants it to.

        Raises:
            CompressionCancelledError: the caller does.
        """
        if self._callbacks.should_cancel():
            raise CompressionCancelledError(
                f"cancelled while {self._stage}; finished layers are kept, resume to go on from there"
            )

    def skip_to(self, share: float) -> None:
        """Passes over what an earlier run has done: it says nothing about the speed of this one."""
        self.step(share)
        self._anchor = self._fraction, time.monotonic()

    def profiled(self, position: int, profile: LayerProfile) -> None:
        """Hands over a layer profile, also one that an earlier run has made."""
        self._callbacks.on_profile(position, profile)

    def profiled_all(self, profile: ModelProfile) -> None:
        """Hands over all layer profiles together."""
        self._callbacks.on_profiled(profile)

    def allocated(self, chosen: Sequence[tuple[LayerProfile, Candidate]]) -> None:
        """Hands over the allocation."""
        self._callbacks.on_allocation([(profile.name, candidate) for profile, candidate in chosen])

    def finish(self) -> None:
        """Reports the end of the run."""
        self._callbacks.on_progress(Progress(stage=self._stage, layer=None, fraction=1.0, seconds_left=0.0))

    def _seconds_left(self) -> float | None:
        if self._anchor is None:
            self._anchor = self._fraction, time.monotonic()
        fraction, began = self._anchor
        if self._fraction <= fraction:
            return None
        return (time.monotonic() - began) / (self._fraction - fraction) * (1 - self._fraction)

    def _energy(self) -> EnergyReading | None:
        return None if self._meter is None else self._meter.reading()

    def _charge(self, stage: Stage, seconds: float, energy_before: EnergyReading | None) -> None:
        before = self._costs.get(stage)
        spent = _spent(energy_before, self._energy(), accelerated=self._device.type != "cpu")
        self._costs[stage] = StageReport(
            name=stage,
            seconds=round(seconds + (before.seconds if before else 0.0), 3),
            peak_memory_bytes=max(_peak_resident_bytes(), before.peak_memory_bytes if before else 0),
            peak_device_bytes=_larger(peak_memory(self._device), before.peak_device_bytes if before else None),
            device=_joined(before.device if before else None, self._device_name),
            energy=spent if before is None else _sum(before.energy, spent),
        )


def _larger(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)


def _joined(earlier: str | None, device: str) -> str:
    """Names of all devices that have worked on a stage."""
    names = [] if earlier is None else earlier.split("; ")
    return "; ".join(dict.fromkeys([*names, device]))


def _spent(before: EnergyReading | None, after: EnergyReading | None, *, accelerated: bool) -> StageEnergy | None:
    """What was taken between two readings; an accelerator that did nothing for the run is not counted."""
    if before is None or after is None:
        return None
    return StageEnergy(
        processor_kwh=round(after.processor_kwh - before.processor_kwh, _KWH_DIGITS),
        memory_kwh=round(after.memory_kwh - before.memory_kwh, _KWH_DIGITS),
        accelerator_kwh=round(after.accelerator_kwh - before.accelerator_kwh, _KWH_DIGITS) if accelerated else None,
        processor_counted=after.processor_counted,
    )


def _sum(one: StageEnergy | None, other: StageEnergy | None) -> StageEnergy | None:
    """Both together; unknown where either is."""
    if one is None or other is None:
        return None
    accelerators = [part for part in (one.accelerator_kwh, other.accelerator_kwh) if part is not None]
    return StageEnergy(
        processor_kwh=one.processor_kwh + other.processor_kwh,
        memory_kwh=one.memory_kwh + other.memory_kwh,
        accelerator_kwh=sum(accelerators) if accelerators else None,
        processor_counted=one.processor_counted and other.processor_counted,
    )


def _reset_peak(device: torch.device) -> None:
    reset_peak_memory(device)
    if sys.platform == "linux":
        # Linux alone can forget a peak; elsewhere, and where it is forbidden, a stage is charged the process's.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_resident_bytes() -> int:
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peaks = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return int(peaks[0].split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
