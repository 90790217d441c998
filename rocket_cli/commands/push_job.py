"""`rocket push-job`: submission of a job that pushes the files of another one to the Hugging Face Hub."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from rocket_cli import options
from rocket_cli.compression_options import SubmissionOptions
from rocket_cli.connection import Connection
from rocket_cli.option_groups import Without
from rocket_cli.submission import submit_job

if TYPE_CHECKING:
    from pydantic import JsonValue

    from rocket_client.client import Rocket
    from rocket_client.models import Job

Export = Annotated[
    str | None,
    options.option(
        "KIND", "Export to push, such as rocket or gguf.", "the first that the job has", **options.EXPORT_VALUE
    ),
]
TokenVariable = Annotated[
    str | None,
    options.option(
        "VARIABLE",
        "Environment variable that holds a Hugging Face Hub token with write access; the server deletes the "
        "token when the push ends.",
        "the token of the server, if you are its only user",
        name="--hub-token-env",
    ),
]
# The token has another meaning here.
Submission = Annotated[SubmissionOptions, Without("hub_token_env")]


def push_job(
    *,
    job_id: options.JobId,
    repository: options.HubRepository,
    export: Export = None,
    private: options.Private = False,
    hub_token_env: TokenVariable = None,
    submission: Submission,
    connection: Connection,
) -> None:
    """Submit a job in which the server pushes the compressed model of JOB to the Hugging Face Hub, and print its id.

    The files do not pass through this machine, as with `rocket push`. They appear in one commit, and what the
    repository has already is not sent again.
    """

    def create(rocket: "Rocket", arguments: dict[str, Any]) -> "Job":
        settings: dict[str, JsonValue] = {
            "private": private,
            "export": export,
            "metadata": arguments.pop("metadata"),
            "queue": arguments.pop("queue", None),
        }
        return rocket.push(job_id, repository, settings, **arguments)

    given = replace(submission, hub_token_env=hub_token_env)
    submit_job(create, job_id, given, connection)
