"""The energy that this process takes, by codecarbon and without a network. Loads no torch.

A processor whose energy counters may be read (RAPL) is measured, as accelerators of NVIDIA and AMD are. Of others the
power is estimated from its model and load, and that of memory always from its size: rough figures, of
which `EnergyReading.processor_counted` tells.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

# Often enough for counters that begin anew after some hundred kilojoules.
_MEASURE_SECONDS = 60
# codecarbon wants one for emissions, which are not asked for.
_ANY_COUNTRY = "USA"
_LIBRARY = "codecarbon"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyReading:
    """Energy since a meter was started, in kWh.

    Attributes:
        processor_kwh: of the processor: all of it where it is counted, this process's share where it is estimated.
        memory_kwh: of the memory that this process holds; always estimated.
        accelerator_kwh: of all accelerators that this process may see (`CUDA_VISIBLE_DEVICES`), used or not.
        processor_counted: whether the processor counts its energy.
    """

    processor_kwh: float = 0.0
    memory_kwh: float = 0.0
    accelerator_kwh: float = 0.0
    processor_counted: bool = False


class EnergyMeter:
    """Measures from `with` on; what it needs takes a second or two to load, in a thread of its own.

    An operator tells codecarbon what it cannot find out through its own variables, such as `CODECARBON_FORCE_CPU_POWER`
    (watts of the processor under full load) or `CODECARBON_PUE`.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._start, name="energy", daemon=True)
        # codecarbon has no types.
        self._tracker: Any = None
        self._latest: Any = None
        self._counted = False
        self._warned = False

    def __enter__(self) -> "EnergyMeter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()
        if self._tracker is not None:
            self._tracker.stop()

    def reading(self) -> EnergyReading | None:
        """Energy so far; None where it cannot be measured, of which the log says why."""
        self._thread.join()
        if self._tracker is not None:
            # It says nothing of errors but in its log; then there is no newer reading.
            self._latest = None
            self._tracker.flush()
        if self._latest is None:
            if not self._warned:
                _log.warning("the energy of this run cannot be measured; at level debug the log says why")
                self._warned = True
            return None
        return EnergyReading(
            processor_kwh=self._latest.cpu_energy,
            memory_kwh=self._latest.ram_energy,
            accelerator_kwh=self._latest.gpu_energy,
            processor_counted=self._counted,
        )

    def _start(self) -> None:
        began = time.monotonic()
        try:
            tracker, counted = _tracker_to(self._keep)
        except ImportError as error:
            _log.warning("%s; install it with: pip install 'rocket-compress[worker]'", error)
            return
        tracker.start()
        self._tracker, self._counted = tracker, counted
        _log.debug("measures energy after %.1f s", time.monotonic() - began)

    def _keep(self, total: Any) -> None:
        self._latest = total


def _tracker_to(keep: Callable[[Any], None]) -> tuple[Any, bool]:
    """A tracker that hands what it measures to a function, and whether it finds a processor that counts."""
    from codecarbon import OfflineEmissionsTracker
    from codecarbon.core.cpu import is_rapl_available
    from codecarbon.output_methods.base_output import BaseOutput

    class Keeper(BaseOutput):
        """Takes each measurement."""

        def out(self, total: Any, delta: Any) -> None:
            """Takes the measurement."""
            del delta
            keep(total)

    log = logging.getLogger(_LIBRARY)
    # What it has to say of every machine without counters is in the report, too.
    level = logging.DEBUG if _log.isEnabledFor(logging.DEBUG) else logging.ERROR
    # It tells of itself before it reads the level that it is given.
    log.setLevel(level)
    tracker = OfflineEmissionsTracker(
        country_iso_code=_ANY_COUNTRY,
        # Emissions depend on the grid, which nobody is asked about here; a number given spares it looking for one.
        force_carbon_intensity_g_co2e_kwh=0.0,
        emissions_endpoint=None,
        output_methods=[],
        output_handlers=[Keeper()],
        api_call_interval=-1,
        measure_power_secs=_MEASURE_SECONDS,
        tracking_mode="process",
        allow_multiple_runs=True,
        log_level=level,
    )
    # Its lines go where all others of the process go, and look like them.
    log.handlers.clear()
    log.propagate = True
    counted = "CODECARBON_FORCE_CPU_POWER" not in os.environ and is_rapl_available()
    return tracker, counted
