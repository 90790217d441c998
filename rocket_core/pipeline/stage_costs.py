"""What each stage of a run costs: time, memory, device and energy, those of runs that it resumes included."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rocket_core.report.schema import StageEnergy, StageReport
from rocket_core.system.devices import device_name, peak_memory, reset_peak_memory
from rocket_core.system.energy import EnergyMeter, EnergyReading

# A run that is killed loses no more of its costs than these.
_KEEP_SECONDS = 10.0
# A hundredth of a joule.
_KWH_DIGITS = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A stage that is under way.

    Attributes:
        name: of the stage.
        at: the clock when it began.
        energy: the meter when it began.
    """

    name: str
    at: float
    energy: EnergyReading | None


class Costs:
    """Adds up what each stage costs.

    Args:
        device: device that computes.
        earlier: costs of the stages in runs that this one resumes.
        meter: measures the energy; None leaves it out.
        keep: given all costs so far, every few seconds of a stage, for a run to come.
    """

    def __init__(
        self,
        device: torch.device,
        earlier: Mapping[str, StageReport],
        *,
        meter: EnergyMeter | None = None,
        keep: Callable[[tuple[StageReport, ...]], None] = lambda _stages: None,
    ) -> None:
        self._device = device
        self._device_name = device_name(device)
        self._costs = dict(earlier)
        self._meter = meter
        self._keep = keep
        self._begun: _Begun | None = None
        self._kept_at = time.monotonic()

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """Cost of each stage, of the one under way that so far."""
        costs = self._costs if self._begun is None else self._costs | {self._begun.name: self._charge(self._begun)}
        return tuple(costs.values())

    def include(self, stage: StageReport) -> None:
        """Add what another process of this machine has spent on a stage."""
        before = self._costs.get(stage.name)
        self._costs[stage.name] = stage.model_copy(
            update={
                "seconds": round(stage.seconds + (before.seconds if before else 0.0), 3),
                "peak_memory_bytes": max(stage.peak_memory_bytes, before.peak_memory_bytes if before else 0),
                "device": _joined(before.device if before else None, self._device_name),
                "energy": stage.energy if before is None else _sum(before.energy, stage.energy),
            }
        )

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Charge a stage with what is done in the block, also if it is cut short."""
        _reset_peak(self._device)
        self._begun = _Begun(name=stage, energy=self._energy(), at=time.monotonic())
        try:
            yield
        finally:
            self._costs[stage] = self._charge(self._begun)
            self._begun = None

    def keep_if_due(self) -> None:
        """Hand over all costs if that is some time ago."""
        if time.monotonic() - self._kept_at >= _KEEP_SECONDS:
            self._keep(self.stages)
            self._kept_at = time.monotonic()

    def _charge(self, begun: _Begun) -> StageReport:
        before = self._costs.get(begun.name)
        seconds = time.monotonic() - begun.at
        spent = _spent(begun.energy, self._energy(), accelerated=self._device.type != "cpu")
        return StageReport(
            name=begun.name,
            seconds=round(seconds + (before.seconds if before else 0.0), 3),
            peak_memory_bytes=max(_peak_resident_bytes(), before.peak_memory_bytes if before else 0),
            peak_device_bytes=_larger(peak_memory(self._device), before.peak_device_bytes if before else None),
            device=_joined(before.device if before else None, self._device_name),
            energy=spent if before is None else _sum(before.energy, spent),
        )

    def _energy(self) -> EnergyReading | None:
        return None if self._meter is None else self._meter.reading()


def _larger(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)


def _joined(earlier: str | None, device: str) -> str:
    """Return names of all devices that have worked on a stage."""
    names = [] if earlier is None else earlier.split("; ")
    return "; ".join(dict.fromkeys([*names, device]))


def _spent(before: EnergyReading | None, after: EnergyReading | None, *, accelerated: bool) -> StageEnergy | None:
    """Return what was taken between two readings; an accelerator that did nothing for the run is not counted.

    One that computes and is said to have taken nothing at all is one that the meter does not see.
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
