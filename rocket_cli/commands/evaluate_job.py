"""`rocket evaluate-job`: submission of a job that evaluates the artifact of an earlier one."""

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from rocket_cli import options
from rocket_cli.compression_options import ServerOptions
from rocket_cli.connection import OutageNotice, command, connected, hub_token
from rocket_cli.following import follow_job, report_end
from rocket_cli.option_groups import Without, expand_groups
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import print_evaluation_report
from rocket_client._defaults import DEFAULT_SERVER

_NAMES = frozenset(
    {"evaluate", "evaluate_samples", "evaluate_length", "evaluate_stride", "task", "task_items", "prompt"}
    | {"answer_tokens"}
)


@dataclass(frozen=True, kw_only=True)
class _LaterOptions(ServerOptions):
    """Options of an evaluation that a job does not start with."""

    evaluate: options.EvaluateJobOn = None


# Only those of the evaluation.
EvaluationOptions = Annotated[
    _LaterOptions, Without(*(field.name for field in fields(_LaterOptions) if field.name not in _NAMES))
]


@expand_groups
def evaluate_job(
    *,
    job_id: options.JobId,
    evaluation: EvaluationOptions,
    hub_token_env: options.HubTokenVariable = None,
    watch: options.Watch = False,
    server: options.Server = DEFAULT_SERVER,
    as_json: options.JsonResult = False,
) -> None:
    """Submit a job that compares the result of JOB with its original, and print its id.

    Both models read a text and answer the prompts. With --watch, the result is shown when the job has ended; it is
    also on the page of JOB.
    """
    token = hub_token(hub_token_env)
    notice = OutageNotice(server, quiet=as_json)
    with connected(server, as_json=as_json, job_id=job_id, notice=notice) as rocket:
        job = rocket.evaluate(job_id, evaluation.evaluation(), hub_token=token)
        notice.end()
        if not as_json:
            typer.echo(job.id)
        if not watch:
            if as_json:
                typer.echo(job.model_dump_json(indent=2))
            else:
                print_line(f"submitted; `{command(server, 'watch', job.id)}` shows its progress")
            return
        job = follow_job(rocket, job, notice, quiet=as_json)
        found = [one for one in rocket.evaluations(job_id) if one.job.id == job.id]
    if as_json and found:
        typer.echo(found[0].model_dump_json(indent=2))
    elif found and found[0].report is not None:
        print_evaluation_report(found[0].report)
    if job.status != "succeeded":
        raise typer.Exit(report_end(job, server, as_json=False))
