"""Cost of a compression, compared with the costs that the paper reports for its method and the previous one."""

from collections.abc import Mapping
from dataclasses import dataclass

from rocket_core.report.figure import Cells, Figure, columns_of, rows_of
from rocket_core.report.schema import CompressionReport

_BILLION = 1e9
# For smaller models most of the cost is fixed, and says nothing about larger models.
_FEWEST_TO_SCALE = 100_000_000
# All parameters of the model that the paper calls Llama3-1b.
_PAPER_PARAMETERS = 1_235_814_400


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cost:
    """What a compression took.

    Attributes:
        name: the compression.
        parameters: parameters of the model.
        energy_kwh: its energy; None if unknown.
        seconds: its time.
        device: what computed it.
    """

    name: str
    parameters: int
    energy_kwh: float | None
    seconds: float
    device: str | None

    def per_billion(self, cost: float | None) -> float | None:
        """Return a cost per billion parameters; None if it is unknown, or the model too small to scale it up."""
        return None if cost is None or self.parameters < _FEWEST_TO_SCALE else cost / (self.parameters / _BILLION)


_TABLE: Mapping[str, Cells[_Cost]] = {
    "name": Cells("compression", lambda cost: cost.name, "text"),
    "parameters": Cells("parameters", lambda cost: cost.parameters, "count"),
    "energy_kwh": Cells("energy", lambda cost: cost.energy_kwh, "energy"),
    "seconds": Cells("time", lambda cost: cost.seconds, "seconds"),
    "energy_per_billion": Cells("energy / 10⁹ parameters", lambda cost: cost.per_billion(cost.energy_kwh), "energy"),
    "seconds_per_billion": Cells("time / 10⁹ parameters", lambda cost: cost.per_billion(cost.seconds), "seconds"),
    "device": Cells("computed on", lambda cost: cost.device, "text"),
}
_PAPER = [
    _Cost(
        name=f"{name}, of Llama3-1b, in the paper",
        parameters=_PAPER_PARAMETERS,
        energy_kwh=energy_kwh,
        seconds=seconds,
        device="NVIDIA A100-SXM4-40GB, AMD EPYC 7742",
    )
    for name, energy_kwh, seconds in (("ROCKET", 0.0765, 930.0), ("CoSpaDi", 7.88, 90080.97))
]
"""Rows of the paper's table "Comparison of energy consumption, runtime, and CO2 emissions"."""


def cost_comparison(report: CompressionReport) -> Figure:
    """Return the cost of a compression next to the paper's, in total and per billion parameters.

    Args:
        report: report of a finished compression.
    """
    own = _Cost(
        name=f"this one, of {report.model}",
        parameters=report.totals.model_parameters,
        energy_kwh=report.energy_kwh,
        seconds=report.seconds,
        device="; ".join(report.devices) or None,
    )
    return Figure(
        name="cost-comparison",
        title="Cost next to the paper's",
        note=_note(report),
        columns=columns_of(_TABLE),
        rows=rows_of(_TABLE, (own, *_PAPER)),
    )


def how_measured(report: CompressionReport) -> str:
    """Return one sentence on how the energy of a report was measured."""
    if report.energy_kwh is None:
        return "The energy was not measured."
    accelerated = any(stage.energy is not None and stage.energy.accelerator_kwh is not None for stage in report.stages)
    sources = ["the accelerator's by its driver"] if accelerated else []
    processor = "estimated from its model and load" if report.energy_is_estimated else "by its own counters"
    sources += [f"the processor's {processor}", "the memory's estimated from its size"]
    return f"Energy as codecarbon tells it: {', '.join(sources)}."


def _note(report: CompressionReport) -> str:
    is_small = report.totals.model_parameters < _FEWEST_TO_SCALE
    small = " A model this small is not scaled up: most of its cost is the same for all." if is_small else ""
    return (
        f"{how_measured(report)} The paper's figures are those of its table on energy, from another machine and for "
        f"another model.{small} Time that a cached profile saved is not counted."
    )
