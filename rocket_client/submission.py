"""What the commands share that hand a job to a server."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from rocket_client.progress import print_line
from rocket_client.remote import OutageNotice, command
from rocket_client.resources import Job
from rocket_client.watch import follow_job, report_end

if TYPE_CHECKING:
    from rocket_client.client import Rocket


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were given: of the others the defaults are the server's."""
    return {name: value for name, value in values.items() if value is not None}


def read_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Labels from `KEY=VALUE`; ends the command where that is none."""
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is no label; write KEY=VALUE", param_hint="--metadata")
        labels[key] = value
    return labels


def follow_submission(rocket: "Rocket", job: Job, notice: OutageNotice, *, watch: bool, quiet: bool) -> Job:
    """Writes the id of a job that was just made, and stays until it ends if that is wanted."""
    notice.end()
    if not quiet:
        typer.echo(job.id)
    return follow_job(rocket, job, notice, quiet=quiet) if watch else job


def end_submission(job: Job, server: str, *, watched: bool, as_json: bool) -> None:
    """Writes what became of it, and exits as the job ended if it was watched."""
    if watched:
        raise typer.Exit(report_end(job, server, as_json=as_json))
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
    else:
        print_line(f"submitted; `{command(server, 'watch', job.id)}` shows how it comes along")
