"""`rocket share`: the link that shows a job to people without a key."""

from typing import Annotated

import typer

from rocket_cli import options
from rocket_cli.connection import Connection
from rocket_cli.progress_view import print_line

WithFiles = Annotated[bool, typer.Option("--with-files", help="Also give the files of the job.")]
End = Annotated[bool, typer.Option("--end", help="End the link instead of creating one.")]


def share(*, job_id: options.JobId, with_files: WithFiles = False, end: End = False, connection: Connection) -> None:
    """Create a link that shows a job that has succeeded to people without an API key, and print it.

    A job has one link: creating another ends it.
    """
    if end and with_files:
        raise typer.BadParameter("a link that is ended gives no files", param_hint="--with-files")
    with connection.client(job_id) as rocket:
        if end:
            rocket.delete_link(job_id)
            print_line(f"the link of {job_id} has ended")
            return
        link = rocket.create_link(job_id, with_files=with_files)
    if connection.as_json:
        typer.echo(link.model_dump_json(indent=2))
        return
    typer.echo(link.url)
    what = "the report and the files" if with_files else "the report"
    again = connection.command("share", job_id, "--end")
    print_line(f"anyone who has this link sees {what} of {job_id}; it is not shown again, and `{again}` ends it")
