"""The work folder and the monitor of a run, from its beginning to its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.resource_errors import resource_errors
from rocket_core.pipeline.stage_costs import Costs
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import StageReport
from rocket_core.system.devices import resolve_device
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.process_memory import map_large_tensors


@contextmanager
def open_work(
    output: Path, device: str, meter: EnergyMeter | None, monitor_of: Callable[[Costs], Monitor]
) -> Iterator[tuple[WorkFolder, Monitor]]:
    """Yield the work folder of a run and its monitor; convert resource errors, and release the folder at the end.

    Args:
        output: the output folder.
        device: name of the device.
        meter: measures the energy of each stage; None leaves it out.
        monitor_of: makes the monitor, given the costs of the stages.

    Raises:
        InvalidConfigError: the output is a file, or the device cannot be used.
        ResourceError: memory or disk ran out.
    """
    resolved = resolve_device(device)
    if output.exists() and not output.is_dir():
        raise InvalidConfigError(f"{output} is a file; give a folder to write to")
    map_large_tensors()
    work = WorkFolder(output / WORK_FOLDER_NAME)

    def save(stages: tuple[StageReport, ...]) -> None:
        if work.is_ours and work.is_claimed:
            work.save_stages(stages)

    costs = Costs(resolved, work.stages(), meter=meter, save=save)
    monitor = monitor_of(costs)
    with resource_errors(output):
        try:
            yield work, monitor
        finally:
            save(costs.stages)
            work.release()
