"""`rocket retry`: a new job that goes on where one failed or was cancelled."""

import typer

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.progress import print_line
from rocket_client.remote import command, connected, hub_token

NAME = "retry"


def retry(
    *,
    job_id: options.JobId,
    hub_token_env: options.HubTokenVariable = None,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Make a new job of one that failed or was cancelled; the new job's id goes to stdout."""
    token = hub_token(hub_token_env)
    with connected(server, as_json=as_json, job_id=job_id) as rocket:
        job = rocket.retry(job_id, hub_token=token)
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
        return
    typer.echo(job.id)
    print_line(f"goes on from the checkpoints of {job_id}; `{command(server, 'watch', job.id)}` shows how")
