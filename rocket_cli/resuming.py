"""Advice on how to resume a run that was interrupted on this machine."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from rocket_cli.progress_view import print_line
from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.errors import ExitCode

# After these the same command may succeed later, and resumes from finished work.
_WORTH_RESUMING = frozenset({ExitCode.MACHINE_TOO_SMALL, ExitCode.TEMPORARY, ExitCode.INTERRUPTED})


def resume_command(arguments: Sequence[str], command: str = "compress") -> str:
    """Return the command line that resumes a run, quoted for a shell.

    Args:
        arguments: arguments of `rocket` on the command line.
        command: name of the command among them.
    """
    # Directly after the name of the command, because later arguments may follow a `--`.
    at = arguments.index(command) + 1
    added = () if "--resume" in arguments else ("--resume",)
    return shlex.join(["rocket", *arguments[:at], *added, *arguments[at:]])


def advise_to_resume(output: Path, arguments: Sequence[str], command: str, kept: str, code: ExitCode) -> None:
    """Print how to resume, if a run has left work and may succeed later.

    Args:
        output: output folder of the run.
        arguments: arguments of `rocket` on the command line.
        command: name of the command among them.
        kept: what was kept, such as "finished layers are".
        code: exit code of the run.
    """
    if code in _WORTH_RESUMING and (output / WORK_FOLDER_NAME).is_dir():
        print_line(f"{kept} kept in {output / WORK_FOLDER_NAME}; to resume:")
        typer.echo(f"    {resume_command(arguments, command)}", err=True)
