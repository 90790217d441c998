"""`rocket export-job`: submission of a job that writes the result of another one in another format."""

from typing import Annotated

from rocket_cli import options
from rocket_cli.commands.export import To
from rocket_cli.compression_options import SubmissionOptions
from rocket_cli.connection import Connection
from rocket_cli.option_groups import Without
from rocket_cli.submission import submit_job

# Such a job reads nothing from the Hub.
Submission = Annotated[SubmissionOptions, Without("hub_token_env")]


def export_job(*, job_id: options.JobId, to: To, submission: Submission, connection: Connection) -> None:
    """Submit a job that writes the result of JOB in another format, with the same weights, and print its id.

    Its files are downloaded with the printed id. Every result has a dense export; where another format cannot hold what
    a result stores, the message says how to compress for it instead.
    """
    submit_job(
        lambda rocket, arguments: rocket.export(job_id, to=to.value, **arguments), job_id, submission, connection
    )
