"""`rocket submit`: submission of a compression job."""

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions, SubmissionOptions
from rocket_cli.option_groups import expand_groups
from rocket_cli.submission import submit_job
from rocket_client._defaults import DEFAULT_SERVER


@expand_groups
def submit(
    *,
    model_id: options.ServerModel,
    compression: ServerOptions,
    submission: SubmissionOptions,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Submit a job that compresses MODEL_ID, and print its id.

    Options that are not given take the server's defaults.
    """
    compression.check_target()
    request = compression.compression_request()
    submit_job(
        lambda rocket, arguments: rocket.submit(model_id, **request, **arguments),
        model_id,
        compression,
        submission,
        server=server,
        as_json=as_json,
    )
