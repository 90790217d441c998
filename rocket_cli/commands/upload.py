"""`rocket upload`: a calibration file or a model, sent to a server."""

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rocket_cli import options
from rocket_cli.commands.download import bytes_view
from rocket_cli.connection import Connection
from rocket_cli.progress_view import print_line, progress_view
from rocket_core.errors import CalibrationError
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.inspection.files.model_files import CONFIG_NAME
from rocket_core.inspection.files.text_rows import TEXT_COLUMN, read_rows, row_document, text_files, text_suffix
from rocket_core.report.formatting import bytes_text, count_text

_SENT_AS_THEY_ARE = (".txt", ".jsonl")


def upload(
    *,
    path: Annotated[
        Path,
        options.argument(
            "PATH",
            "A model's folder; or texts or chats to calibrate on: a .txt, .md, .jsonl, .json, .csv or .parquet file, "
            "or a folder of .txt and .md files.",
        ),
    ],
    name: Annotated[
        str | None, options.option("NAME", "Name of the model on the server.  [default: that of the folder]")
    ] = None,
    calibration_column: options.Column = None,
    skip_bad_rows: options.SkipBadRows = False,
    connection: Connection,
) -> None:
    """Upload a model or a calibration file to a server, and print the name to use with `rocket submit`.

    A model's small files and headers are sent first: one that cannot be compressed is refused before its weights are
    sent. Running the command again resumes. Uploading the same file again returns the same upload.
    """
    is_folder = path.is_dir()
    if is_folder and ((path / CONFIG_NAME).is_file() or not text_files(path)):
        _upload_model(path, name, connection)
        return
    if name is not None:
        raise typer.BadParameter("only a model's folder gets a name; leave it out", param_hint="--name")
    with connection.client() as rocket, ExitStack() as stack:
        chosen = calibration_column is not None or skip_bad_rows
        if chosen or is_folder or (text_suffix(path) is not None and path.suffix.lower() not in _SENT_AS_THEY_ARE):
            folder = Path(stack.enter_context(TemporaryDirectory()))
            path = _converted(path, folder, calibration_column, skip_bad_rows=bool(skip_bad_rows))
        uploaded = rocket.upload(path)
        connection.notice.end()
    if connection.as_json:
        typer.echo(uploaded.model_dump_json(indent=2))
        return
    typer.echo(uploaded.id)
    print_line(f"{uploaded.documents} documents; use them with `rocket submit ... --calibration {uploaded.id}`")


def _converted(path: Path, folder: Path, column: str | None, *, skip_bad_rows: bool) -> Path:
    """Write texts and chats as the lines of a `.jsonl` file in a folder, and return it."""
    file = folder / f"{path.name.partition('.')[0]}.jsonl"
    skipped = 0
    with file.open("w", encoding="utf-8") as lines:
        local_path_of(str(path))
        for row in read_rows(path):
            try:
                found = row_document(row, column)
            except CalibrationError:
                if not skip_bad_rows:
                    raise
                skipped += 1
            else:
                text = json.dumps({TEXT_COLUMN: found}) if isinstance(found, str) else found.content
                lines.write(f"{text}\n")
    if skipped:
        print_line(f"{skipped} rows without text are left out")
    return file


def _upload_model(folder: Path, name: str | None, connection: Connection) -> None:
    with connection.client() as rocket, progress_view(quiet=connection.as_json) as view:
        model = rocket.upload_model(
            folder, name=name, on_progress=bytes_view(view, connection.notice, stage="uploading")
        )
    if connection.as_json:
        typer.echo(model.model_dump_json(indent=2, exclude={"files"}))
        return
    typer.echo(model.id)
    size = f"{bytes_text(model.size)}, {count_text(model.parameters or 0)} parameters"
    print_line(f"{size}; compress it with `{connection.command('submit', model.id, '--ratio', '0.3')}`")
