"""`rocket submit`: submission of a compression job."""

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions, SubmissionOptions
from rocket_cli.connection import Connection
from rocket_cli.submission import submit_job


def submit(
    *, model_id: options.ServerModel, compression: ServerOptions, submission: SubmissionOptions, connection: Connection
) -> None:
    """Submit a job that compresses MODEL_ID, and print its id.

    Options that are not given take the server's defaults.
    """
    compression.check_target()
    request = compression.compression_request()
    submit_job(
        lambda rocket, arguments: rocket.submit(model_id, **request, **arguments),
        model_id,
        submission,
        connection,
        compression,
    )
