"""`rocket compress`: compression of a model on this machine."""

import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_cli import options
from rocket_cli.compression_options import LocalOptions
from rocket_cli.exit_codes import reported_failures
from rocket_cli.option_groups import expand_groups
from rocket_cli.progress_view import hide_library_bars, print_line, progress_view
from rocket_cli.report_table import print_report
from rocket_cli.signals import stopping_on_signals
from rocket_client._exit_codes import ExitCode
from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.report.schema import CompressionReport
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.gc_pause import no_collection
from rocket_core.system.threads import set_thread_defaults

if TYPE_CHECKING:
    from rocket_core.pipeline import Progress


# After these the same command may succeed later, and resumes from the finished layers.
_WORTH_RESUMING = frozenset({ExitCode.MACHINE_TOO_SMALL, ExitCode.TEMPORARY, ExitCode.INTERRUPTED})


@expand_groups
def compress(
    *,
    context: typer.Context,
    model: options.Model,
    output: options.Output,
    compression: LocalOptions,
    all_layers: options.Table = False,
    as_json: options.Json = False,
) -> None:
    """Compress MODEL into OUT, without training.

    Ctrl-C stops after the current layer; the same command with --resume continues from there.
    """
    compression.check_target()
    command = context.obj or ()
    with reported_failures(as_json=as_json, advice=lambda code: _advice(code, output, command)):
        report = _run(model, output, compression, quiet=as_json)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, output, all_layers=all_layers)


def _run(model: str, output: Path, compression: LocalOptions, *, quiet: bool) -> CompressionReport:
    from rocket_core.inspection.requests import check_request

    config = compression.config()
    # Before torch is imported, which takes seconds.
    check_request(model, config)
    set_thread_defaults(os.environ)
    with EnergyMeter() if compression.energy else nullcontext() as meter:
        # This takes seconds, in which the meter gets ready.
        with no_collection(lasting=True):
            from rocket_core.pipeline import compress as run_pipeline

        cache = None
        if compression.profiles is not None:
            from rocket_core.pipeline import ProfileCache

            cache = ProfileCache(compression.profiles)
        hide_library_bars()
        with progress_view(quiet=quiet) as view, stopping_on_signals(view.announce_stop) as stop:

            def show(progress: "Progress") -> None:
                view.show(progress.stage, progress.layer or "", progress.fraction, progress.seconds_left)

            return run_pipeline(
                model,
                output,
                config,
                revision=compression.revision,
                resume=compression.resume,
                profiles=cache,
                meter=meter,
                on_progress=show,
                should_cancel=stop.made,
            )


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that resumes a run, quoted for a shell.

    Args:
        arguments: arguments of `rocket` on the command line.
    """
    # Directly after the name of the command, because later arguments may follow a `--`.
    at = arguments.index("compress") + 1
    added = () if "--resume" in arguments else ("--resume",)
    return shlex.join(["rocket", *arguments[:at], *added, *arguments[at:]])


def _advice(code: ExitCode, output: Path, arguments: Sequence[str]) -> None:
    if code in _WORTH_RESUMING and (output / WORK_FOLDER_NAME).is_dir():
        print_line(f"finished layers are kept in {output / WORK_FOLDER_NAME}; to resume:")
        typer.echo(f"    {resume_command(arguments)}", err=True)
