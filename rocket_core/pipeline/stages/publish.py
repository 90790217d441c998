"""The output folder: whose result may lie there, and how one appears, complete or not at all."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from rocket_core.config import WORK_FOLDER_NAME, CompressionConfig, ExportKind
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.report_builder import without_paths
from rocket_core.pipeline.state.files import write_text
from rocket_core.pipeline.state.work_folder import RunIdentity, WorkFolder
from rocket_core.report.html import render_report
from rocket_core.report.model_card import model_card
from rocket_core.report.schema import CompressionReport

REPORT_NAME = "report.json"
PAGE_NAME = "report.html"


def publish(
    run: Run, output: Path, work: WorkFolder, report: CompressionReport, folders: Mapping[ExportKind, Path]
) -> None:
    """Move the complete artifacts to their place; the report in `output` says that all are there."""
    text = report.model_dump_json(indent=1) + "\n"
    page = render_report(report)
    for export in report.exports:
        folder = folders[export.kind]
        write_text(folder / "README.md", model_card(report, export.kind, run.source.folder))
        write_text(folder / REPORT_NAME, text)
        write_text(folder / PAGE_NAME, page)
    refuse_occupied(output, work, run.config)
    work.begin_publishing()
    for export in report.exports:
        # What a run killed between these moves has left: its own artifact, made again since.
        shutil.rmtree(output / export.folder, ignore_errors=True)
        folders[export.kind].replace(output / export.folder)
    write_text(output / PAGE_NAME, page)
    # Last: where it lies, all else does.
    write_text(output / REPORT_NAME, text)
    work.remove()


def finished_report(output: Path, identity: RunIdentity, *, resume: bool) -> CompressionReport | None:
    """Return the report of a run that had finished; raises where that was another run."""
    file = output / REPORT_NAME
    if not file.is_file():
        return None
    try:
        finished = CompressionReport.model_validate_json(file.read_bytes())
    except ValidationError:
        finished = None
    if resume and finished is not None and finished.fingerprint == identity.fingerprint:
        # A run killed behind its last move may have left this.
        shutil.rmtree(output / WORK_FOLDER_NAME, ignore_errors=True)
        return finished
    raise InvalidConfigError(
        f"{output} already holds the result of another compression; choose another output folder, or remove what is "
        "there"
    )


def refuse_another_evaluation(finished: CompressionReport, config: CompressionConfig, output: Path) -> None:
    """Refuse to take a finished run for one with another evaluation.

    Raises:
        InvalidConfigError: it was evaluated in another way, or not at all.
    """
    wanted = without_paths(config).evaluate
    if wanted is not None and wanted != finished.settings.evaluate:
        raise InvalidConfigError(
            f"the compression in {output} is finished and its evaluation was another one, or none; measure the "
            "artifact with `rocket evaluate`, or leave evaluate out"
        )


def refuse_occupied(output: Path, work: WorkFolder, config: CompressionConfig) -> None:
    """Refuse to write over folders that are not this run's own."""
    occupied = [kind for kind in config.export if (output / kind).exists()]
    if occupied and not work.is_publishing:
        raise InvalidConfigError(
            f"{output} already holds {occupied[0]}, which this run has not made; choose another output folder, or "
            "remove what is there"
        )
