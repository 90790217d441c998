"""Cost of a compression, compared with the costs that the paper reports for its method and the previous one."""

from rocket_core.report.figures import Column, Figure
from rocket_core.report.schema import CompressionReport

_BILLION = 1e9
# For smaller models most of the cost is fixed, and says nothing about larger models.
_FEWEST_TO_SCALE = 100_000_000
_PAPER_MACHINE = "NVIDIA A100-SXM4-40GB, AMD EPYC 7742"
# All parameters of the model with this name in the paper's table.
_PAPER_MODEL, _PAPER_PARAMETERS = "Llama3-1b", 1_235_814_400
# Name, kWh, seconds: table "Comparison of energy consumption, runtime, and CO2 emissions".
_PAPER_ROWS = (("ROCKET", 0.0765, 930.0), ("CoSpaDi", 7.88, 90080.97))


def cost_comparison(report: CompressionReport) -> Figure:
    """Return the cost of a compression next to the paper's, in total and per billion parameters.

    Args:
        report: report of a finished compression.
    """
    totals = report.totals
    own = _row(
        f"this one, of {report.model}",
        parameters=totals.model_parameters,
        device="; ".join(report.devices) or None,
        energy_kwh=report.energy_kwh,
        seconds=report.seconds,
    )
    paper = (
        _row(
            f"{name}, of {_PAPER_MODEL}, in the paper",
            parameters=_PAPER_PARAMETERS,
            device=_PAPER_MACHINE,
            energy_kwh=energy_kwh,
            seconds=seconds,
        )
        for name, energy_kwh, seconds in _PAPER_ROWS
    )
    return Figure(
        name="cost-comparison",
        title="Cost next to the paper's",
        note=_note(report),
        columns=(
            Column(name="name", title="compression", kind="text"),
            Column(name="parameters", title="parameters", kind="count"),
            Column(name="energy_kwh", title="energy", kind="energy"),
            Column(name="seconds", title="time", kind="seconds"),
            Column(name="energy_per_billion", title="energy / 10⁹ parameters", kind="energy"),
            Column(name="seconds_per_billion", title="time / 10⁹ parameters", kind="seconds"),
            Column(name="device", title="computed on", kind="text"),
        ),
        rows=(own, *paper),
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


def _row(
    name: str, *, parameters: int, device: str | None, energy_kwh: float | None, seconds: float
) -> dict[str, str | int | float | None]:
    billions = parameters / _BILLION
    scales = parameters >= _FEWEST_TO_SCALE
    return {
        "name": name,
        "parameters": parameters,
        "energy_kwh": energy_kwh,
        "seconds": seconds,
        "energy_per_billion": energy_kwh / billions if scales and energy_kwh is not None else None,
        "seconds_per_billion": seconds / billions if scales else None,
        "device": device,
    }
