"""`rocket upload`: a calibration file or a model, sent to a server."""

from pathlib import Path
from typing import Annotated

import typer

from rocket_cli import options
from rocket_cli.commands.download import bytes_view
from rocket_cli.connection import Connection
from rocket_cli.progress_view import print_line, progress_view
from rocket_core.report.formatting import bytes_text, count_text


def upload(
    *,
    path: Annotated[
        Path,
        options.argument(
            "PATH", 'A model\'s folder; or a .txt file, or a .jsonl file of {"text": ...} documents, to calibrate on.'
        ),
    ],
    name: Annotated[
        str | None, options.option("NAME", "Name of the model on the server.  [default: that of the folder]")
    ] = None,
    connection: Connection,
) -> None:
    """Upload a model or a calibration file to a server, and print the name to use with `rocket submit`.

    A model's small files and headers are sent first: one that cannot be compressed is refused before its weights are
    sent. Running the command again resumes. Uploading the same file again returns the same upload.
    """
    if path.is_dir():
        _upload_model(path, name, connection)
        return
    if name is not None:
        raise typer.BadParameter("only a model's folder gets a name; leave it out", param_hint="--name")
    with connection.client() as rocket:
        uploaded = rocket.upload(path)
        connection.notice.end()
    if connection.as_json:
        typer.echo(uploaded.model_dump_json(indent=2))
        return
    typer.echo(uploaded.id)
    print_line(f"{uploaded.documents} documents; use them with `rocket submit ... --calibration {uploaded.id}`")


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
