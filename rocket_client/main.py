"""The console script `rocket`. Commands import torch only once they run, so that help and completion are instant."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import rocket_client.compress
import rocket_client.evaluate
from rocket_client.failures import MEANINGS
from rocket_core import __version__

_EXIT_CODES = "\n".join(["Exit codes:", *(f"{int(code):>3}  {meaning}" for code, meaning in MEANINGS.items())])

app = typer.Typer(
    name="rocket",
    help="Make transformer models smaller, without training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(rocket_client.compress.NAME, epilog=_EXIT_CODES)(rocket_client.compress.compress)
app.command(rocket_client.evaluate.NAME, epilog=_EXIT_CODES)(rocket_client.evaluate.evaluate)


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
