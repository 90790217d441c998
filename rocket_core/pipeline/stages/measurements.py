"""What is measured of the written artifacts, if requested: quality, then speed."""

from collections.abc import Mapping
from pathlib import Path

from rocket_core.engines import ExportKind
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.benchmark import measure_exports
from rocket_core.pipeline.stages.evaluate import EvaluationPlan, evaluate_export
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.speed import SpeedReport


def measure(
    run: Run, plan: EvaluationPlan | None, folders: Mapping[ExportKind, Path], work: WorkFolder, monitor: Monitor
) -> tuple[EvaluationReport | None, SpeedReport | None]:
    """Return the quality and the speed of the artifacts, each None unless it is requested.

    Args:
        run: the run.
        plan: the planned evaluation; None if the quality is not measured.
        folders: the written artifacts.
        work: work folder for the results.
        monitor: notified of every step.
    """
    evaluation = speed = None
    if plan is not None:
        with monitor.stage("evaluating"):
            evaluation = evaluate_export(run, plan, folders, work, monitor)
    if run.config.benchmark:
        with monitor.stage("benchmarking"):
            speed = measure_exports(run, folders, work, monitor)
    return evaluation, speed
