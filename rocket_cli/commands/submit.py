"""`rocket submit`: submission of a compression job."""

from dataclasses import replace

import typer

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions, SubmissionOptions
from rocket_cli.connection import Connection
from rocket_cli.earlier_job import IMPROVES, request_like
from rocket_cli.submission import submit_job


def submit(
    *,
    model_id: options.SubmittedModel = None,
    earlier: options.EarlierJob = None,
    compression: ServerOptions,
    submission: SubmissionOptions,
    connection: Connection,
) -> None:
    """Submit a job that compresses MODEL_ID, or the model of an earlier job, and print its id.

    Options that are not given take the server's defaults, or the values of the earlier job.
    """
    if (model_id is None) == (earlier is None):
        raise typer.BadParameter("specify either MODEL_ID or --from JOB")
    compression.check_target(is_optional=earlier is not None)
    request = compression.compression_request()
    if earlier is not None:
        with connection.client() as rocket:
            job = rocket.get_job(earlier)
        request, model_id = request_like(job, request), job.model_id
        submission = replace(submission, metadata=[f"{IMPROVES}={job.id}", *(submission.metadata or ())])
    assert model_id is not None
    name = model_id
    submit_job(
        lambda rocket, arguments: rocket.submit(name, **request, **arguments),
        name,
        submission,
        connection,
        compression,
    )
