"""Shared parts of the commands that submit or estimate a job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from rocket_cli.compression_options import ServerOptions, SubmissionOptions
from rocket_cli.connection import Connection, explain_names, hub_token
from rocket_cli.following import follow_job, report_end
from rocket_cli.progress_view import print_line
from rocket_client.errors import ProblemError
from rocket_client.models import Job

if TYPE_CHECKING:
    from rocket_client.client import Rocket

_NO_OPTIONS = ServerOptions()


@contextmanager
def explained_refusals(rocket: "Rocket", model_id: str, options: ServerOptions) -> Iterator[None]:
    """Add suggestions from the server to its refusals of a command's arguments."""
    try:
        yield
    except ProblemError as error:
        datasets = (options.calibration, options.evaluate)
        explained = explain_names(rocket, error, model_id=model_id, datasets=datasets)
        raise _naming_pattern(explained, options.ignore or ()) from error


def _naming_pattern(error: ProblemError, patterns: Sequence[str]) -> ProblemError:
    """Add the refused `--ignore` pattern to an error: the server reports only its position."""
    member, _, position = (error.param or "").rpartition(".")
    if member != "options.ignore" or not position.isdecimal() or int(position) >= len(patterns):
        return error
    return error.explained(f"--ignore {patterns[int(position)]!r}: {error.detail}")


def read_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Return labels from `KEY=VALUE` pairs; raises typer.BadParameter for other text."""
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is not a label; write KEY=VALUE", param_hint="--metadata")
        labels[key] = value
    return labels


def submit_job(
    create: Callable[["Rocket", dict[str, Any]], Job],
    model_id: str,
    submission: SubmissionOptions,
    connection: Connection,
    options: ServerOptions = _NO_OPTIONS,
) -> None:
    """Create a job and write its id, or the job as JSON; with `--watch`, follow it and exit with its outcome.

    Args:
        create: calls the method of the client, with those arguments on how the job is submitted that were given.
        model_id: the model, or the job whose result the new one works on.
        submission: how to submit the job.
        connection: the server.
        options: how to compress or profile the model.
    """
    given = {
        "metadata": read_labels(submission.metadata or ()),
        "queue": submission.queue,
        "idempotency_key": submission.idempotency_key,
        "hub_token": hub_token(submission.hub_token_env),
    }
    arguments = {name: value for name, value in given.items() if value is not None}
    with connection.client() as rocket:
        with explained_refusals(rocket, model_id, options):
            job = create(rocket, arguments)
        connection.notice.end()
        if not connection.as_json:
            typer.echo(job.id)
            for warning in job.warnings:
                print_line(f"warning: {warning}")
        if submission.watch:
            job = follow_job(rocket, job, connection)
    if submission.watch:
        raise typer.Exit(report_end(job, connection))
    print_submitted(job, connection)


def print_submitted(job: Job, connection: Connection) -> None:
    """Write a job that is not followed: as JSON, or how to follow it."""
    if connection.as_json:
        typer.echo(job.model_dump_json(indent=2))
    else:
        print_line(f"submitted; `{connection.command('watch', job.id)}` shows its progress")
