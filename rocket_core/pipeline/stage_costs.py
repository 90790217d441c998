"""Cost of each stage of a run: time, memory, device and energy, including the runs that it resumes."""

import contextlib
import functools
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rocket_core.config import STAGES
from rocket_core.linalg.kernels import recorded_names
from rocket_core.report.schema import StageEnergy, StageReport
from rocket_core.system.devices import device_name, peak_memory, reset_peak_memory
from rocket_core.system.energy import EnergyMeter, EnergyReading

# A killed run loses at most the costs of this many seconds.
_SAVE_SECONDS = 10.0
_ORDER: Mapping[str, int] = {stage: position for position, stage in enumerate(STAGES)}
# A hundredth of a joule.
_KWH_DIGITS = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenStage:
    """A stage in progress.

    Attributes:
        name: name of the stage.
        at: time on the clock when it started.
        energy: reading of the meter when it started.
        kernels: names of the loops of rounding that it has run.
        others: costs of processes that have taken part.
    """

    name: str
    at: float
    energy: EnergyReading | None
    kernels: Set[str]
    others: list[StageReport] = field(default_factory=list)


class Costs:
    """Sums of the cost of each stage.

    Args:
        device: compute device.
        earlier: costs of the stages in runs that this one resumes.
        meter: measures the energy; None leaves it out.
        save: called with all costs so far every few seconds, to store them for a later run.
    """

    def __init__(
        self,
        device: torch.device,
        earlier: Mapping[str, StageReport],
        *,
        meter: EnergyMeter | None = None,
        save: Callable[[tuple[StageReport, ...]], None] = lambda _stages: None,
    ) -> None:
        self._device = device
        self._device_name = device_name(device)
        self._costs = dict(earlier)
        self._meter = meter
        self._save = save
        self._open_stage: _OpenStage | None = None
        self._saved_at = time.monotonic()

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """Cost of each stage, including the stage in progress so far."""
        costs = (
            self._costs
            if self._open_stage is None
            else self._costs | {self._open_stage.name: self._charge(self._open_stage)}
        )
        return tuple(costs.values())

    def include(self, stage: StageReport) -> None:
        """Add the cost of a stage that another process on this machine has run."""
        self._costs[stage.name] = self._with_earlier(stage.model_copy(update={"device": self._device_name}))

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Charge the block to a stage, even if it is interrupted."""
        _reset_peak(self._device)
        with recorded_names() as kernels:
            self._open_stage = _OpenStage(name=stage, energy=self._energy(), kernels=kernels, at=time.monotonic())
            try:
                yield
            finally:
                self._costs[stage] = self._charge(self._open_stage)
                self._open_stage = None

    def add_process(self, cost: StageReport) -> None:
        """Add what a process that takes part in the stage in progress needed; its time is not added.

        Args:
            cost: of the process.
        """
        assert self._open_stage is not None
        self._open_stage.others.append(cost)

    def save_if_due(self) -> None:
        """Store all costs if some time has passed since they were last stored."""
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self._save(self.stages)
            self._saved_at = time.monotonic()

    def _charge(self, open_stage: _OpenStage) -> StageReport:
        spent = StageReport(
            name=open_stage.name,
            seconds=round(time.monotonic() - open_stage.at, 3),
            peak_memory_bytes=_peak_resident_bytes() + sum(other.peak_memory_bytes for other in open_stage.others),
            peak_device_bytes=functools.reduce(
                _larger, (other.peak_device_bytes for other in open_stage.others), peak_memory(self._device)
            ),
            device=_counted(self._device_name, *(other.device for other in open_stage.others)),
            kernels="; ".join(sorted(open_stage.kernels)) or None,
            energy=_spent(open_stage.energy, self._energy(), accelerated=self._device.type != "cpu"),
        )
        return self._with_earlier(spent)

    def _with_earlier(self, stage: StageReport) -> StageReport:
        before = self._costs.get(stage.name)
        return stage if before is None else _combined(before, stage)

    def _energy(self) -> EnergyReading | None:
        return None if self._meter is None else self._meter.reading()


def combined_costs(earlier: Iterable[StageReport], later: Iterable[StageReport]) -> tuple[StageReport, ...]:
    """Return the cost of each stage of two runs, one of which continues the result of the other, in order of stages."""
    costs = {stage.name: stage for stage in earlier}
    for stage in later:
        before = costs.get(stage.name)
        costs[stage.name] = stage if before is None else _combined(before, stage)
    return tuple(sorted(costs.values(), key=lambda stage: _ORDER.get(stage.name, len(_ORDER))))


def _combined(one: StageReport, other: StageReport) -> StageReport:
    return StageReport(
        name=one.name,
        seconds=round(one.seconds + other.seconds, 3),
        peak_memory_bytes=max(one.peak_memory_bytes, other.peak_memory_bytes),
        peak_device_bytes=_larger(one.peak_device_bytes, other.peak_device_bytes),
        device=_joined(one.device, other.device),
        kernels=_joined(one.kernels, other.kernels),
        energy=_sum(one.energy, other.energy),
    )


def _counted(*names: str | None) -> str:
    """Return names of devices, those that are equal once with their number."""
    counts = Counter(name for name in names if name is not None)
    return "; ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _larger(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)


def _joined(*known: str | None) -> str | None:
    """Return the names of all devices, or all kernels, that have worked on a stage, each once; None without any."""
    names = (name for text in known if text is not None for name in text.split("; "))
    return "; ".join(dict.fromkeys(names)) or None


def _spent(before: EnergyReading | None, after: EnergyReading | None, *, accelerated: bool) -> StageEnergy | None:
    """Return the energy used between two readings; an accelerator is counted only if the run computes on it.

    If the run computes on an accelerator whose reading is zero, the meter cannot see it, and the energy is unknown.
    """
    if before is None or after is None or (accelerated and not after.accelerator_kwh):
        return None
    return StageEnergy(
        processor_kwh=round(after.processor_kwh - before.processor_kwh, _KWH_DIGITS),
        memory_kwh=round(after.memory_kwh - before.memory_kwh, _KWH_DIGITS),
        accelerator_kwh=round(after.accelerator_kwh - before.accelerator_kwh, _KWH_DIGITS) if accelerated else None,
        processor_counted=after.processor_counted,
    )


def _sum(one: StageEnergy | None, other: StageEnergy | None) -> StageEnergy | None:
    """Return the sum of both; None if either is unknown."""
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
        # Only Linux can reset the peak; elsewhere, or if that is forbidden, a stage is charged the peak of the process.
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
