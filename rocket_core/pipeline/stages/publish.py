"""The output folder: checks that it may be written to, and atomic publication of a result."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from rocket_core.config import WORK_FOLDER_NAME, CompressionConfig
from rocket_core.engines import ExportKind
from rocket_core.errors import InvalidConfigError
from rocket_core.exports.artifact_folder import REPORT_NAME, write_description, write_report
from rocket_core.exports.output_folder import check_without, is_of_another_run
from rocket_core.pipeline.report_builder import without_paths
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import CompressionReport


def publish(
    original: Path, output: Path, work: WorkFolder, report: CompressionReport, folders: Mapping[ExportKind, Path]
) -> None:
    """Move the complete artifacts into place, and remove the work folder; arguments are those of `place`."""
    place(original, output, work, report, folders)
    work.remove()


def place(
    original: Path, output: Path, work: WorkFolder, report: CompressionReport, folders: Mapping[ExportKind, Path]
) -> None:
    """Move the complete artifacts into place; a report in `output` means that all of them are there.

    Args:
        original: folder of the original model, whose card may name its licence.
        output: the output folder.
        work: work folder with the artifacts, which is kept.
        report: the report.
        folders: the artifacts.
    """
    for export in report.exports:
        write_description(folders[export.kind], report, export.kind, original)
    move_into_place(output, work, folders)
    # The report is written last: if it exists, everything else does.
    write_report(output, report)


def move_into_place(output: Path, work: WorkFolder, folders: Mapping[ExportKind, Path]) -> None:
    """Move complete artifacts out of the work folder, each into its own folder of the output."""
    check_output_free(output, work, folders)
    work.begin_publishing()
    for kind, folder in folders.items():
        # A run killed between these moves may have left its own artifact, which has been made again since.
        shutil.rmtree(output / kind, ignore_errors=True)
        folder.replace(output / kind)


def finished_report(output: Path, identity: RunIdentity, *, resume: bool) -> CompressionReport | None:
    """Return the report of this run if it has finished; raise an error if the result belongs to another run."""
    file = output / REPORT_NAME
    if not file.is_file():
        return None
    try:
        finished = CompressionReport.model_validate_json(file.read_bytes())
    except ValidationError:
        finished = None
    if resume and finished is not None and finished.fingerprint == identity.fingerprint:
        # A run killed after its last move may have left this.
        shutil.rmtree(output / WORK_FOLDER_NAME, ignore_errors=True)
        return finished
    raise is_of_another_run(output)


def check_same_measurements(finished: CompressionReport, config: CompressionConfig, output: Path) -> None:
    """Raise an error if a finished run lacks a requested evaluation, verdict or benchmark.

    Raises:
        InvalidConfigError: the run was evaluated with other settings or bounds, or something was not measured at all.
    """
    if config.benchmark and finished.speed is None:
        raise InvalidConfigError(
            f"the compression in {output} is finished and its speed was not measured; measure the artifacts with "
            "`rocket bench`, or leave benchmark out"
        )
    requested = without_paths(config).evaluate
    if requested is not None and requested != finished.settings.evaluate:
        raise InvalidConfigError(
            f"the compression in {output} is finished and its evaluation was another one, or none; measure the "
            "artifact with `rocket evaluate`, or leave evaluate out"
        )
    if config.accept is not None and config.accept != finished.settings.accept:
        raise InvalidConfigError(
            f"the compression in {output} is finished, and its verdict is about other bounds, or it has none; compare "
            "them with its measured quality yourself, and leave accept out"
        )


def check_output_free(output: Path, work: WorkFolder, exports: Iterable[ExportKind]) -> None:
    """Raise an error if folders that this run would write to exist and are not its own."""
    if not work.is_publishing:
        check_without(output, exports)
