"""The output folder of a compression: what of an earlier run is in it. Loads no torch."""

from collections.abc import Iterable
from pathlib import Path

from rocket_core.config import RUN_NAME, WORK_FOLDER_NAME
from rocket_core.engines import ExportKind
from rocket_core.errors import InvalidConfigError
from rocket_core.exports.artifact_folder import REPORT_NAME


def check_unused(output: Path, exports: Iterable[ExportKind]) -> None:
    """Raise an error if a folder is not one that a new run may write to.

    Args:
        output: the folder; need not exist.
        exports: folders within it that will be written.

    Raises:
        InvalidConfigError: it is a file, or has the result or the unfinished work of another run.
    """
    if output.exists() and not output.is_dir():
        raise InvalidConfigError(f"{output} is a file; give a folder to write to")
    if (output / WORK_FOLDER_NAME / RUN_NAME).is_file():
        raise is_unfinished(output / WORK_FOLDER_NAME)
    if (output / REPORT_NAME).is_file():
        raise is_of_another_run(output)
    check_without(output, exports)


def check_without(output: Path, exports: Iterable[ExportKind]) -> None:
    """Raise an error if folders that a run would write to exist."""
    occupied = [kind for kind in exports if (output / kind).exists()]
    if occupied:
        raise InvalidConfigError(
            f"{output} already holds {occupied[0]}, which this run has not made; choose another output folder, or "
            "remove that folder"
        )


def is_unfinished(work: Path) -> InvalidConfigError:
    """Return the error for a work folder that a run has left."""
    return InvalidConfigError(
        f"{work} holds the work of an unfinished run; resume it, or remove that folder to start afresh"
    )


def is_of_another_run(output: Path) -> InvalidConfigError:
    """Return the error for a folder with the result of another run."""
    return InvalidConfigError(
        f"{output} already holds the result of another compression; choose another output folder, or remove what is "
        "there"
    )
