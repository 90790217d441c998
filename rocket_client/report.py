"""`rocket report`: what each layer of a job's model got, and why."""

from pathlib import Path

import typer

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.remote import command, connected
from rocket_client.rendering import print_report

NAME = "report"


def report(
    *, job_id: options.JobId, server: options.Server = DEFAULT_SERVER, as_json: options.JsonResult = False
) -> None:
    """Show the report of a job that has succeeded, layer by layer."""
    with connected(server, as_json=as_json, job_id=job_id) as rocket:
        found = rocket.report(job_id)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        print_report(found, Path(job_id), fetched_by=command(server, "download", job_id))
