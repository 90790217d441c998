"""`rocket jobs`: what the server has done, does and will do."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice

import typer
from rich.filesize import decimal as bytes_text
from rich.table import Table
from rich.text import Text

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.progress import percentage, print_line
from rocket_client.remote import command, connected
from rocket_client.rendering import age_text, percent, wide_console
from rocket_client.resources import Job

NAME = "jobs"


def jobs(
    *,
    status: options.Status = None,
    limit: options.JobLimit = 20,
    after: options.After = None,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """List jobs, newest first."""
    with connected(server, as_json=as_json) as rocket:
        # One more tells whether there are more.
        found = list(islice(rocket.iterate_jobs(status=status, after=after), limit + 1))
    shown, has_more = found[:limit], len(found) > limit
    if as_json:
        typer.echo(json.dumps({"data": [job.model_dump(mode="json") for job in shown], "has_more": has_more}, indent=2))
        return
    if not shown:
        print_line(f"no {status or ''} jobs".replace("  ", " "))
        return
    wide_console().print(_table(shown, datetime.now(UTC)))
    if has_more:
        narrowed = () if status is None else ("--status", status)
        print_line(f"older ones: {command(server, NAME, *narrowed, '--after', shown[-1].id)}")


def _table(found: Sequence[Job], now: datetime) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for column in ("job", "status", "progress", "model", "target", "age"):
        table.add_column(column, justify="right" if column in {"target", "age"} else "left", no_wrap=True)
    for job in found:
        age = age_text((now - job.created_at).total_seconds())
        cells = (job.id, job.status, _progress(job), job.model_id, _target(job), age)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _target(job: Job) -> str:
    if job.target_bytes is not None:
        return f"≤ {bytes_text(job.target_bytes)}"
    return "profile" if job.ratio is None else percent(job.ratio)


def _progress(job: Job) -> str:
    if job.has_ended:
        return "" if job.error is None else job.error.code
    return " ".join(part for part in (job.stage or "", percentage(job.progress)) if part)
