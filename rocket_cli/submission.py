"""Shared parts of the commands that submit or estimate a job."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from rocket_cli import options
from rocket_cli.connection import OutageNotice, command, explain_names
from rocket_cli.following import follow_job, report_end
from rocket_cli.progress_view import print_line
from rocket_client.errors import ProblemError
from rocket_client.models import Job

if TYPE_CHECKING:
    from rocket_client.client import Rocket


# Options of a command that are, under the same names, parts of a request.
_CALIBRATION = ("samples", "sequence_length", "seed")
_SETTINGS = ("preset", "method", "objective", "budget", "ignore", "export", "dtype", "precision")


def request_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Rocket.submit` and similar methods, except the model and its target.

    Args:
        values: arguments of the command by their names. Options that the command does not have, or that were not given,
            are left out, as the server has the defaults.
    """
    given = {name: value for name, value in values.items() if value is not None}
    text = {"dataset": given["calibration"]} if "calibration" in given else {}
    parts = {
        "revision": given.get("revision"),
        "calibration": text | {name: given[name] for name in _CALIBRATION if name in given},
        "options": {name: given[name] for name in _SETTINGS if name in given},
    }
    if "evaluate" in values:
        parts["evaluate"] = options.evaluation(
            dataset=values["evaluate"],
            samples=values["evaluate_samples"],
            sequence_length=values["evaluate_length"],
            stride=values["evaluate_stride"],
            tasks=values["task"],
            task_items=values["task_items"],
        )
    return parts


@contextmanager
def explained_refusals(rocket: "Rocket", values: Mapping[str, Any]) -> Iterator[None]:
    """Add suggestions from the server to its refusals of the command's arguments.

    Args:
        rocket: client of the server.
        values: arguments of the command by their names.
    """
    try:
        yield
    except ProblemError as error:
        datasets = (values["calibration"], values.get("evaluate"))
        explained = explain_names(rocket, error, model_id=values["model_id"], datasets=datasets)
        raise _naming_pattern(explained, values["ignore"] or ()) from error


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


def follow_submission(rocket: "Rocket", job: Job, notice: OutageNotice, *, watch: bool, quiet: bool) -> Job:
    """Write the id of a new job, and follow it until it ends if `watch` is set."""
    notice.end()
    if not quiet:
        typer.echo(job.id)
    return follow_job(rocket, job, notice, quiet=quiet) if watch else job


def end_submission(job: Job, server: str, *, watched: bool, as_json: bool) -> None:
    """Write the job or how to watch it; if it was watched, write its outcome and exit with the matching code."""
    if watched:
        raise typer.Exit(report_end(job, server, as_json=as_json))
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
    else:
        print_line(f"submitted; `{command(server, 'watch', job.id)}` shows how it comes along")
