"""`rocket watch`: progress and outcome of a job."""

import typer

from rocket_cli import options
from rocket_cli.connection import Connection
from rocket_cli.following import follow_job, report_end


def watch(*, job_id: options.JobId, connection: Connection) -> None:
    """Show the progress of a job until it ends, and exit with a code for its outcome.

    Ctrl-C stops watching; the job continues. Watching survives a restart of the server.
    """
    with connection.client(job_id) as rocket:
        job = rocket.get_job(job_id)
        ended = follow_job(rocket, job, connection)
    raise typer.Exit(report_end(ended, connection))
