"""`rocket cancel`: ends a job before it is done."""

import typer

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.progress import print_line
from rocket_client.remote import OutageNotice, command, connected
from rocket_client.watch import follow_job

NAME = "cancel"


def cancel(
    *,
    job_id: options.JobId,
    wait: options.Wait = False,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Cancel a job; what it has finished is kept for a retry."""
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, job_id=job_id, notice=notice) as rocket:
        job = rocket.cancel(job_id)
        notice.end()
        if wait:
            job = follow_job(rocket, job, notice, quiet=as_json)
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
    elif job.has_ended:
        print_line(f"{job.id} is {job.status}; `{command(server, 'retry', job.id)}` goes on from its checkpoints")
    else:
        print_line(f"{job.id} stops as soon as its worker notices; `{command(server, 'watch', job.id)}` shows when")
