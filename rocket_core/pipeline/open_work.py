"""The work folder and the monitor of a run, from its beginning to its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline.observer import Observer
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.progress_bar import shown
from rocket_core.pipeline.resource_errors import resource_errors
from rocket_core.pipeline.stage_costs import Costs
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import StageReport
from rocket_core.system.devices import resolve_devices
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.process_memory import keep_freed_memory


@contextmanager
def open_work(
    output: Path,
    device: str,
    observer: Observer | None,
    monitor_of: Callable[[Observer, Costs], Monitor],
    *,
    meter: EnergyMeter | None = None,
    download: StageReport | None = None,
) -> Iterator[tuple[WorkFolder, Monitor]]:
    """Yield the work folder of a run and its monitor; convert resource errors, and release the folder at the end.

    Args:
        output: the output folder.
        device: names of the devices; costs are those of the first, until others are noted.
        observer: the caller's; None for a bar if a person looks on.
        monitor_of: makes the monitor, given the observer and the costs of the stages.
        meter: measures the energy of each stage; None leaves it out.
        download: cost of downloading the model, if it was found before.

    Raises:
        InvalidConfigError: the output is a file, or the device cannot be used.
        ResourceError: memory or disk ran out.
    """
    first = resolve_devices(device)[0]
    if output.exists() and not output.is_dir():
        raise InvalidConfigError(f"{output} is a file; give a folder to write to")
    keep_freed_memory()
    work = WorkFolder(output / WORK_FOLDER_NAME)

    def save(stages: tuple[StageReport, ...]) -> None:
        if work.is_ours and work.is_claimed:
            work.save_stages(stages)

    costs = Costs(first, work.stages(), meter=meter, save=save)
    if download is not None:
        costs.include(download)
    with resource_errors(output), shown(observer) as notified:
        try:
            yield work, monitor_of(notified, costs)
        finally:
            save(costs.stages)
            work.release()
