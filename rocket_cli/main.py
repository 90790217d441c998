"""The console script `rocket`. Commands import torch only when they run, so that help and completion are fast."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rocket_cli.commands import (
    bench,
    catalog,
    compress,
    download,
    estimate,
    evaluate,
    frontier,
    jobs,
    profile,
    push,
    submit,
    watch,
)
from rocket_cli.exit_codes import MEANINGS, missing_extra, report_failure
from rocket_cli.service import admin, api, migrate, serve, worker
from rocket_core import __version__

_EXIT_CODES = "\n".join(["Exit codes:", *(f"{int(code):>3}  {meaning}" for code, meaning in MEANINGS.items())])


class _Commands(TyperGroup):
    """Group of commands that also reports wrong usage as JSON if the command line asks for JSON."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            if "--json" in (ctx.obj or ()):
                typer.echo(json.dumps({"error": {"code": "invalid_usage", "message": error.format_message()}}))
            raise


app = typer.Typer(
    name="rocket",
    cls=_Commands,
    help="Compress transformer models without training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# In the order in which a new user needs them; each is named after its function.
for _command in (
    compress.compress,
    evaluate.evaluate,
    bench.bench,
    serve.serve,
    catalog.models,
    catalog.calibrations,
    catalog.upload,
    estimate.estimate,
    submit.submit,
    jobs.jobs,
    watch.watch,
    jobs.report,
    profile.profile,
    catalog.profiles,
    frontier.frontier,
    download.download,
    push.push,
    jobs.cancel,
    jobs.retry,
    # For a service of several processes.
    migrate.migrate,
    api.api,
    worker.worker,
):
    app.command(epilog=_EXIT_CODES)(_command)
app.add_typer(admin.app, name="admin", epilog=_EXIT_CODES)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"rocket {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code.

    Args:
        arguments: arguments of `rocket`; None takes those of the process.
    """
    values = sys.argv[1:] if arguments is None else list(arguments)
    # Commands get the arguments as `context.obj`, to print the command line that resumes an interrupted run.
    try:
        app(args=values, prog_name="rocket", obj=tuple(values))
    except ImportError as error:
        # Service commands import what the base install lacks.
        failure = missing_extra(error)
        if failure is None:
            raise
        report_failure(failure, as_json="--json" in values)
        sys.exit(failure.exit_code)
