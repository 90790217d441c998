"""`rocket profiles`: of which models a server knows how they would be at any ratio."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.predictions import Profile
from rocket_client.progress import print_line
from rocket_client.remote import command, connected
from rocket_client.rendering import age_text, percent, wide_console

NAME = "profiles"

After = Annotated[str | None, typer.Option(metavar="PROFILE", help="Only profiles older than this one.")]
# What a page of the server may have.
Limit = Annotated[int, typer.Option(metavar="N", min=1, max=100, help="How many at most.")]


def profiles(
    *,
    limit: Limit = 20,
    after: After = None,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """List profiles, newest first: what `rocket frontier` shows, and what spares a second job the calibration."""
    with connected(server, as_json=as_json) as rocket:
        page = rocket.list_profiles(after=after, limit=limit)
    if as_json:
        typer.echo(page.model_dump_json(indent=2))
        return
    if not page.data:
        print_line("no profiles; each job makes one, unless there is one for it")
        return
    wide_console().print(_table(page.data, datetime.now(UTC)))
    if page.has_more:
        print_line(f"older ones: {command(server, NAME, '--after', page.data[-1].id)}")


def _table(found: Sequence[Profile], now: datetime) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for column in ("profile", "model", "calibration", "layers", "up to", "age", "used"):
        is_number = column in {"layers", "up to", "age", "used"}
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for profile in found:
        ages = (age_text((now - at).total_seconds()) for at in (profile.created_at, profile.used_at))
        data = f"{profile.calibration.dataset}, {profile.calibration.samples}"
        cells = (profile.id, profile.model_id, data, str(profile.layers), percent(profile.reachable_ratio), *ages)
        table.add_row(*(Text(cell) for cell in cells))
    return table
