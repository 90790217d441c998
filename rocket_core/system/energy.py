"""Energy used by this process, measured by codecarbon without network access. Loads no torch.

A processor with readable energy counters (RAPL) is measured, as are NVIDIA and AMD accelerators. The power of other
processors is estimated from their model and load, and that of memory always from its size. These estimates are rough;
`EnergyReading.processor_counted` says whether the processor was measured.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Often enough for counters that wrap around after some hundred kilojoules.
_MEASURE_SECONDS = 60
# codecarbon requires a country for emissions, which are not used here.
_ANY_COUNTRY = "USA"
_LIBRARY = "codecarbon"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyReading:
    """Energy since a meter was started, in kWh.

    Attributes:
        processor_kwh: energy of the processor: all of it if counted, this process's share if estimated.
        memory_kwh: energy of the memory that this process holds; always estimated.
        accelerator_kwh: energy of all accelerators visible to this process (`CUDA_VISIBLE_DEVICES`), used or not.
        processor_counted: whether the processor's energy counters were read.
    """

    processor_kwh: float = 0.0
    memory_kwh: float = 0.0
    accelerator_kwh: float = 0.0
    processor_counted: bool = False


class EnergyMeter:
    """A context manager that measures energy; its dependencies load in a background thread, in a second or two.

    Operators can supply what codecarbon cannot detect through its own environment variables, such as
    `CODECARBON_FORCE_CPU_POWER` (watts of the processor under full load) or `CODECARBON_PUE`.
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

    def __exit__(self, *_error: object) -> None:
        self._thread.join()
        if self._tracker is not None:
            self._tracker.stop()

    def reading(self) -> EnergyReading | None:
        """Return the energy so far; None if it cannot be measured, with the reason in the log."""
        self._thread.join()
        if self._tracker is not None:
            # codecarbon reports errors only in its log; then no newer reading exists.
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
            _log.warning("%s; install it with: pip install 'rocket-compress[torch]'", error)
            return
        tracker.start()
        self._tracker, self._counted = tracker, counted
        _log.debug("measures energy after %.1f s", time.monotonic() - began)

    def _keep(self, total: Any) -> None:
        self._latest = total


def _tracker_to(keep: Callable[[Any], None]) -> tuple[Any, bool]:
    """Return a tracker that passes its measurements to a function, and whether the processor has energy counters."""
    from codecarbon import OfflineEmissionsTracker
    from codecarbon.core.cpu import is_rapl_available
    from codecarbon.output_methods.base_output import BaseOutput

    class Keeper(BaseOutput):
        """An output that passes on each measurement."""

        def out(self, total: Any, delta: Any) -> None:
            """Pass on the measurement."""
            del delta
            keep(total)

    log = logging.getLogger(_LIBRARY)
    # Its messages about machines without counters are redundant: the report says so, too.
    level = logging.DEBUG if _log.isEnabledFor(logging.DEBUG) else logging.ERROR
    # codecarbon logs about itself before it applies the level passed to it.
    log.setLevel(level)
    tracker = OfflineEmissionsTracker(
        country_iso_code=_ANY_COUNTRY,
        # Emissions depend on the grid, which is not known here; a fixed number prevents codecarbon from looking one up.
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
    # Its messages go to the log of the process, in the same format.
    log.handlers.clear()
    log.propagate = True
    counted = "CODECARBON_FORCE_CPU_POWER" not in os.environ and is_rapl_available()
    return tracker, counted
