"""Speed and memory of the original and of each artifact, if requested; the last stage.

It changes no artifact. A finished measurement is kept; one that was interrupted starts again.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from rocket_core.engines import ExportKind
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.speed import SpeedReport
from rocket_core.speed import SpeedSettings, find_subject, measure_speed

ORIGINAL = "original"


def measure_exports(run: Run, folders: Mapping[ExportKind, Path], work: WorkFolder, monitor: Monitor) -> SpeedReport:
    """Measure the original and the artifacts in turns, on the device and with the threads of the run.

    Args:
        run: the run.
        folders: the written artifacts.
        work: work folder for the result.
        monitor: notified of every measurement.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
        RocketError: see `measure_speed`.
    """
    known = work.speed()
    if known is not None:
        return known
    original = find_subject(run.source.folder, ORIGINAL)
    artifacts = [find_subject(folder, kind) for kind, folder in folders.items()]
    report = measure_speed(
        [original, *artifacts],
        SpeedSettings(threads=torch.get_num_threads(), device=str(run.device)),
        on_step=lambda share, _what: monitor.step(share),
        check=monitor.check,
    )
    work.save_speed(report)
    return report
