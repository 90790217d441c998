"""`rocket watch`: progress and outcome of a job."""

import typer

from rocket_cli import options
from rocket_cli.connection import OutageNotice, connected
from rocket_cli.following import follow_job, report_end
from rocket_client._defaults import DEFAULT_SERVER


def watch(
    *, job_id: options.JobId, server: options.Server = DEFAULT_SERVER, as_json: options.JsonResult = False
) -> None:
    """Show the progress of a job until it ends, and exit with a code for its outcome.

    Ctrl-C stops watching; the job continues. Watching survives a restart of the server.
    """
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, job_id=job_id, notice=notice) as rocket:
        job = rocket.get_job(job_id)
        ended = follow_job(rocket, job, notice, quiet=as_json)
    raise typer.Exit(report_end(ended, server, as_json=as_json))
