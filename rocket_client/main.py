"""The console script `rocket`. Commands import torch only once they run, so that help and completion are instant."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rocket_client import (
    admin,
    api,
    cancel,
    compress,
    download,
    evaluate,
    frontier,
    jobs,
    migrate,
    report,
    retry,
    serve,
    submit,
    upload,
    watch,
    worker,
)
from rocket_client.failures import MEANINGS
from rocket_core import __version__

_EXIT_CODES = "\n".join(["Exit codes:", *(f"{int(code):>3}  {meaning}" for code, meaning in MEANINGS.items())])

app = typer.Typer(
    name="rocket",
    help="Make transformer models smaller, without training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# In the order in which a newcomer meets them.
for _name, _command in (
    (compress.NAME, compress.compress),
    (evaluate.NAME, evaluate.evaluate),
    (serve.NAME, serve.serve),
    (upload.NAME, upload.upload),
    (submit.NAME, submit.submit),
    (jobs.NAME, jobs.jobs),
    (watch.NAME, watch.watch),
    (report.NAME, report.report),
    (frontier.NAME, frontier.frontier),
    (download.NAME, download.download),
    (cancel.NAME, cancel.cancel),
    (retry.NAME, retry.retry),
    # For a service of several processes.
    (migrate.NAME, migrate.migrate),
    (api.NAME, api.api),
    (worker.NAME, worker.worker),
):
    app.command(_name, epilog=_EXIT_CODES)(_command)
app.add_typer(admin.app, name=admin.NAME, epilog=_EXIT_CODES)


def _print_version(asked: bool) -> None:
    if asked:
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
    """Runs a command and exits with its code.

    Args:
        arguments: what follows `rocket`; None takes the process's own.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Commands get the arguments as `context.obj`, to tell how an interrupted one is resumed.
    app(args=given, prog_name="rocket", obj=tuple(given))
