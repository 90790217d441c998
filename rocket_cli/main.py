"""The console script `rocket`. Commands import torch only when they run, so that help and completion are fast."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rocket_cli.command_words import plain_message, taken_for_a_value
from rocket_cli.commands import (
    bench,
    catalog,
    compress,
    download,
    estimate,
    evaluate,
    evaluate_job,
    export,
    export_job,
    frontier,
    heal,
    heal_job,
    jobs,
    mcp,
    profile,
    push,
    push_job,
    share,
    submit,
    upload,
    watch,
    webhooks,
)
from rocket_cli.exit_codes import MEANINGS, missing_extra, report_failure
from rocket_cli.option_groups import CommandGroup
from rocket_cli.service import admin, api, migrate, serve, worker
from rocket_core import __version__

_CODES_TOPIC = "exit-codes"
_EPILOG = f"`rocket help {_CODES_TOPIC}` lists the exit codes."


class _Commands(TyperGroup):
    """Group of commands that also reports wrong usage as JSON if the command line asks for JSON."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._explained(ctx)
        except typer.TyperException as error:
            error.message = plain_message(error.message)
            if "--json" in (ctx.obj or ()):
                typer.echo(json.dumps({"error": {"code": "invalid_usage", "message": error.format_message()}}))
            raise

    def _explained(self, ctx: Any) -> Any:
        """Run the command; if an option took the next one for its value, that is the error, whatever it led to."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            of_command: Any = getattr(error, "ctx", None) or ctx
            taken = _taken_for_a_value(of_command)
            if taken is not None:
                of_command.fail(taken)
            raise


def _taken_for_a_value(context: Any) -> str | None:
    options = [parameter for parameter in context.command.params if parameter.param_type_name == "option"]
    valued = [name for option in options if not (option.is_flag or option.count) for name in option.opts]
    known = [name for option in options for name in (*option.opts, *option.secondary_opts)]
    return taken_for_a_value(context.obj or (), valued, known)


app = CommandGroup(
    name="rocket",
    cls=_Commands,
    help="Compress transformer models without training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# Under the headings of the help, in the order in which a new user needs them; each is named after its function.
_LOCAL, _REMOTE, _SERVICE = "On this machine", "With a service", "Run a service"
for _panel, _functions in {
    _LOCAL: (compress.compress, estimate.estimate, heal.heal, evaluate.evaluate, export.export, bench.bench),
    _REMOTE: (
        catalog.models,
        catalog.calibrations,
        upload.upload,
        submit.submit,
        heal_job.heal_job,
        export_job.export_job,
        jobs.jobs,
        watch.watch,
        jobs.report,
        evaluate_job.evaluate_job,
        profile.profile,
        catalog.profiles,
        frontier.frontier,
        download.download,
        push.push,
        push_job.push_job,
        share.share,
        jobs.cancel,
        jobs.retry,
        mcp.mcp,
    ),
    _SERVICE: (serve.serve, migrate.migrate, api.api, worker.worker),
}.items():
    for _function in _functions:
        app.command(epilog=_EPILOG, rich_help_panel=_panel)(_function)
app.add_typer(webhooks.app, name="webhooks", epilog=_EPILOG, rich_help_panel=_REMOTE)
app.add_typer(admin.app, name="admin", epilog=_EPILOG, rich_help_panel=_SERVICE)


@app.command("help", epilog=_EPILOG, rich_help_panel=_LOCAL)
def _help(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help=f"A command, or {_CODES_TOPIC}.", show_default=False)
    ] = None,
) -> None:
    """Explain a command, or the exit codes of all commands."""
    if topic == _CODES_TOPIC:
        for code, meaning in MEANINGS.items():
            typer.echo(f"{int(code):>3}  {meaning}")
        return
    app(args=[*([] if topic is None else [topic]), "--help"], prog_name="rocket")


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
