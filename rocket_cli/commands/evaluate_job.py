"""`rocket evaluate-job`: submission of a job that evaluates the artifact of an earlier one."""

from dataclasses import dataclass, fields, replace
from typing import Annotated

import typer

from rocket_cli import options
from rocket_cli.compression_options import EVALUATION_SETTINGS, ServerOptions
from rocket_cli.connection import Connection, hub_token
from rocket_cli.following import follow_job, report_end
from rocket_cli.option_groups import Without
from rocket_cli.report_table import print_evaluation_report
from rocket_cli.submission import print_submitted


@dataclass(frozen=True, kw_only=True)
class _LaterOptions(ServerOptions):
    """Options of an evaluation that a job does not start with."""

    evaluate: options.EvaluateJobOn = None


# Only those of the evaluation.
EvaluationOptions = Annotated[
    _LaterOptions, Without(*(field.name for field in fields(_LaterOptions) if field.name not in EVALUATION_SETTINGS))
]


def evaluate_job(
    *,
    job_id: options.JobId,
    evaluation: EvaluationOptions,
    hub_token_env: options.HubTokenVariable = None,
    watch: options.Watch = False,
    connection: Connection,
) -> None:
    """Submit a job that compares the result of JOB with its original, and print its id.

    Both models read a text and answer the prompts. With --watch, the result is shown when the job has ended; it is
    also on the page of JOB.
    """
    token = hub_token(hub_token_env)
    with connection.client(job_id) as rocket:
        job = rocket.evaluate(job_id, evaluation.evaluation(), hub_token=token)
        connection.notice.end()
        if not connection.as_json:
            typer.echo(job.id)
        if not watch:
            print_submitted(job, connection)
            return
        job = follow_job(rocket, job, connection)
        found = [one for one in rocket.evaluations(job_id) if one.job.id == job.id]
    if connection.as_json and found:
        typer.echo(found[0].model_dump_json(indent=2))
    elif found and found[0].report is not None:
        print_evaluation_report(found[0].report)
    if job.status != "succeeded":
        raise typer.Exit(report_end(job, replace(connection, as_json=False)))
