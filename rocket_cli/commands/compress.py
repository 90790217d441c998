"""`rocket compress`: compression of a model on this machine."""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_cli import options
from rocket_cli.compression_options import LocalOptions
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import hide_library_bars, print_line, progress_view
from rocket_cli.report_table import print_report
from rocket_cli.resuming import advise_to_resume
from rocket_cli.signals import stopping_on_signals
from rocket_core.report.schema import CompressionReport
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.gc_pause import no_collection
from rocket_core.system.torch_environment import set_torch_defaults

if TYPE_CHECKING:
    from rocket_core.pipeline import Progress


def compress(
    *,
    context: typer.Context,
    model: options.Model,
    output: options.Output,
    compression: LocalOptions,
    all_layers: options.Table = False,
    as_json: options.Json = False,
) -> None:
    """Compress MODEL into OUT, without training unless --refine, --preset max or --heal asks for it.

    Ctrl-C stops after the current layer; the same command with --resume continues from there.
    """
    compression.check_target()
    advise = partial(advise_to_resume, output, context.obj or (), "compress", "finished layers are")
    with reported_failures(as_json=as_json, advice=advise):
        report = _run(model, output, compression, quiet=as_json)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, output, all_layers=all_layers)


def _run(model: str, output: Path, compression: LocalOptions, *, quiet: bool) -> CompressionReport:
    from rocket_core.exports.gguf_size import dense_file_bytes
    from rocket_core.hub.requests import check_request

    config = compression.config(device=compression.device, dtype=compression.dtype, precision=compression.precision)
    # Before torch is imported, which takes seconds.
    check_request(model, config, revision=compression.revision, file_size=dense_file_bytes)
    set_torch_defaults(os.environ)
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
                on_warning=lambda warning: None if quiet else print_line(f"warning: {warning}"),
                should_cancel=stop.made,
            )
