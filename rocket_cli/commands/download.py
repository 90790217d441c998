"""`rocket download`: download of a job's artifacts."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_cli import options
from rocket_cli.connection import Connection, OutageNotice
from rocket_cli.progress_view import ProgressView, print_line, progress_view
from rocket_core.report.formatting import bytes_text

if TYPE_CHECKING:
    from rocket_client._download import DownloadedFile
    from rocket_client._wire import TransferProgress


_SECONDS_BEFORE_ESTIMATE = 2.0


def download(
    *,
    job_id: options.JobId,
    folder: options.DownloadFolder = None,
    export: options.DownloadExport = None,
    connection: Connection,
) -> None:
    """Download the files of a job that has succeeded into DIR, and print the folder.

    Running the command again resumes. Every file is verified by its SHA-256, including those that exist already.
    """
    target = (Path(job_id) if folder is None else folder).absolute()
    with connection.client(job_id) as rocket, progress_view(quiet=connection.as_json) as view:
        files = rocket.download(job_id, target, exports=export or (), on_progress=bytes_view(view, connection.notice))
    if connection.as_json:
        shown = [described(file) | {"outcome": file.outcome.value} for file in files]
        typer.echo(json.dumps({"folder": str(target), "files": shown}, indent=2))
        return
    for line in _summary(files):
        print_line(line)
    typer.echo(str(target))


def bytes_view(
    view: ProgressView, notice: OutageNotice, clock: Callable[[], float] = time.monotonic, *, stage: str = "downloading"
) -> Callable[["TransferProgress"], None]:
    """Return a callback for downloads and uploads that shows their progress in bytes."""
    began = clock()

    def show(progress: "TransferProgress") -> None:
        notice.end()
        seconds, seconds_left = clock() - began, None
        if progress.received and seconds > _SECONDS_BEFORE_ESTIMATE:
            seconds_left = seconds / progress.received * (progress.total - progress.done)
        fraction = progress.done / progress.total if progress.total else 1.0
        size = f"{bytes_text(progress.done)} of {bytes_text(progress.total)}"
        view.show(stage, f"{size} {progress.name}", fraction, seconds_left)

    return show


def _summary(files: Sequence["DownloadedFile"]) -> list[str]:
    counts = Counter(file.outcome.value for file in files)
    size = bytes_text(sum(file.artifact.size for file in files))
    replaced = [f"{file.path} differed and was replaced" for file in files if file.outcome == "replaced"]
    already = f", {counts['kept']} of them already present" if counts["kept"] else ""
    return [*replaced, f"{len(files)} files of {size}, verified by their SHA-256{already}"]


def described(file: "DownloadedFile") -> dict[str, str | int]:
    """Return a downloaded file as commands write it in JSON."""
    named: dict[str, str | int] = {"name": file.artifact.name, "path": str(file.path)}
    return named | {"size": file.artifact.size, "sha256": file.artifact.sha256}
