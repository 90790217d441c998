"""`rocket upload`: brings a calibration file of one's own to a server."""

from pathlib import Path
from typing import Annotated

import typer

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.progress import print_line
from rocket_client.remote import OutageNotice, connected

NAME = "upload"


def upload(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .txt file, or a .jsonl file of texts.")],
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Bring FILE to a server; what `rocket submit --calibration` takes goes to stdout.

    The same content again is the same upload.
    """
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, notice=notice) as rocket:
        kept = rocket.upload(file)
        notice.end()
    if as_json:
        typer.echo(kept.model_dump_json(indent=2))
        return
    typer.echo(kept.id)
    print_line(f"{kept.documents} documents; use it with `rocket submit ... --calibration {kept.id}`")
