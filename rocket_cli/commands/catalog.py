"""`rocket models`, `rocket calibrations` and `rocket profiles`: resources of a server."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table

from rocket_cli import options
from rocket_cli.connection import Connection
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import print_names, text_table, wide_console
from rocket_client.models import Profile
from rocket_core.report.formatting import age_text, percent_text

After = Annotated[str | None, options.option("PROFILE", "Only profiles older than this one.")]
# The upper bound is that of the server's pages.
Limit = Annotated[int, options.option("N", "Maximum number of profiles.", min=1, max=100)]


def models(
    *,
    delete: Annotated[
        str | None, options.option("MODEL", "Delete this uploaded model, upload/NAME, instead of listing models.")
    ] = None,
    connection: Connection,
) -> None:
    """List the models in the server's folder and your uploads, by the names that `rocket submit` accepts.

    What looks like a model but cannot be compressed is listed on stderr, with what to do.
    """
    with connection.client() as rocket:
        if delete is not None:
            rocket.delete_model(delete)
            return
        found = rocket.list_models()
    print_names([model.id for model in found if model.problem is None], "models", as_json=connection.as_json)
    for model in (each for each in found if each.problem is not None and not connection.as_json):
        print_line(f"{model.id} cannot be compressed: {model.problem}")


def calibrations(*, connection: Connection) -> None:
    """List calibration data, uploads included, by the names that `rocket submit --calibration` accepts."""
    with connection.client() as rocket:
        names = rocket.calibrations()
    print_names(names, "calibration data", as_json=connection.as_json)


def profiles(*, limit: Limit = 20, after: After = None, connection: Connection) -> None:
    """List profiles, newest first. Jobs reuse them instead of calibrating again; `rocket frontier` plots them."""
    with connection.client() as rocket:
        page = rocket.list_profiles(after=after, limit=limit)
    if connection.as_json:
        typer.echo(page.model_dump_json(indent=2))
        return
    if not page.data:
        print_line("no profiles; a job creates one unless a matching one exists")
        return
    wide_console().print(_table(page.data, datetime.now(UTC)))
    if page.has_more:
        print_line(f"older ones: {connection.command('profiles', '--after', page.data[-1].id)}")


def _table(rows: Sequence[Profile], now: datetime) -> Table:
    cells = []
    for profile in rows:
        ages = (age_text((now - at).total_seconds()) for at in (profile.created_at, profile.used_at))
        data = f"{profile.calibration.dataset}, {profile.calibration.samples}"
        reachable = percent_text(profile.reachable_ratio)
        cells.append((profile.id, profile.model_id, data, str(profile.layers), reachable, *ages))
    numbers = ("layers", "up to", "age", "used")
    return text_table(("profile", "model", "calibration", *numbers), cells, right=numbers)
