"""`rocket frontier`: predicted size and error of a model at every ratio."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rocket_cli import options
from rocket_cli.connection import Connection
from rocket_cli.plots import error_curve
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import text_table, wide_console
from rocket_client.errors import InvalidArgumentError
from rocket_client.models import Frontier, Job
from rocket_core.report.figures import ERROR_NAMES
from rocket_core.report.formatting import bytes_text, percent_text

_PROFILE = "prof_"
_BAR = 40
# Width of the other columns.
_OTHER_COLUMNS = 48
# The table shows every fifth of a hundred points, and the last.
_STEP = 5


def frontier(
    *,
    job_or_profile: options.JobOrProfile,
    table: Annotated[bool, typer.Option("--table", help="Show only the table, without the curve.")] = False,
    connection: Connection,
) -> None:
    """Show size and predicted error of a profiled model at every ratio, as a curve (in a terminal) and a table."""
    is_profile = job_or_profile.startswith(_PROFILE)
    with connection.client(None if is_profile else job_or_profile) as rocket:
        profile_id = job_or_profile
        if not is_profile:
            job = rocket.get_job(job_or_profile)
            if job.profile_id is None:
                raise InvalidArgumentError(_why_none(job, connection))
            profile_id = job.profile_id
        result = rocket.frontier(profile_id)
        model_id = rocket.get_profile(profile_id).model_id
    if connection.as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    screen, console = Console(), wide_console()
    curve = None if table else error_curve(result.data, screen)
    if curve is not None:
        screen.print(curve)
    # A terminal that wraps lines would make the table unreadable.
    bar = min(_BAR, max(0, screen.width - _OTHER_COLUMNS)) if screen.is_terminal else _BAR
    console.print(_table(result, bar, block="#" if console.options.ascii_only else "█"))
    # A newer server may have other objectives.
    meaning = next((text for name, text in ERROR_NAMES.items() if name == result.objective), result.objective)
    console.print(f"Predicted error: {meaning}", style="dim")
    print_line(f"to create one of these models: {connection.command('submit', model_id, '--ratio', 'R')}")


def _why_none(job: Job, connection: Connection) -> str:
    if job.status != "succeeded":
        return f"{job.id} is {job.status} and has no profile yet; a job has one once all layers are profiled"
    again = connection.command("profile", job.model_id)
    return (
        f"the profile of {job.id} was deleted, by a user or because it was unused for long; `{again}` with the same "
        "options creates it again"
    )


def _table(result: Frontier, longest: int, block: str) -> Table:
    numbers = ("ratio", "size", "of original", "predicted error")
    rows = []
    for index, point in enumerate(result.data):
        if index % _STEP == 0 or index == len(result.data) - 1:
            fraction = point.model_bytes / result.dense_bytes
            bar, size = block * round(longest * fraction), bytes_text(point.model_bytes)
            rows.append((f"{point.ratio:.2f}", size, percent_text(fraction), bar, f"{point.error:.3g}"))
    return text_table((*numbers[:3], "", numbers[3]), rows, right=numbers)
