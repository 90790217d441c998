"""`rocket compress`: compression of a model on this machine."""

from functools import partial
from pathlib import Path

import typer

from rocket_cli import options
from rocket_cli.compression_options import LocalOptions
from rocket_cli.exit_codes import reported_failures
from rocket_cli.local_run import local_run
from rocket_cli.report_table import print_report
from rocket_cli.resuming import advise_to_resume
from rocket_core.errors import ExitCode
from rocket_core.report.schema import CompressionReport


def compress(
    *,
    call: typer.Context,
    model: options.Model,
    output: options.Output,
    compression: LocalOptions,
    all_layers: options.Table = False,
    as_json: options.Json = False,
) -> None:
    """Compress MODEL, a checkpoint or a GGUF file, into OUT.

    Nothing is trained unless --refine, --preset max or --heal asks for it. Ctrl-C stops after the current layer; the
    same command with --resume continues from there.
    """
    compression.check_target()
    advise = partial(advise_to_resume, output, call.obj or (), "compress", "finished layers are")
    with reported_failures(as_json=as_json, advice=advise):
        report = _run(model, output, compression, quiet=as_json)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, output, all_layers=all_layers)
    if report.verdict is not None and not report.verdict.is_accepted:
        raise typer.Exit(ExitCode.NOT_ACCEPTED)


def _run(model: str, output: Path, compression: LocalOptions, *, quiet: bool) -> CompressionReport:
    from rocket_core.exports.gguf_size import dense_file_bytes
    from rocket_core.exports.output_folder import check_unused
    from rocket_core.hub.requests import check_request

    config = compression.config(device=compression.device, dtype=compression.dtype, precision=compression.precision)
    # Before torch is imported, which takes seconds.
    if not compression.resume:
        check_unused(output, config.export)
    check_request(model, config, revision=compression.revision, file_size=dense_file_bytes)
    with local_run(energy=compression.energy, quiet=quiet) as (meter, observer):
        from rocket_core.pipeline import ProfileCache
        from rocket_core.pipeline import compress as run_pipeline

        return run_pipeline(
            model,
            output,
            config,
            revision=compression.revision,
            resume=compression.resume,
            profiles=None if compression.profiles is None else ProfileCache(compression.profiles),
            meter=meter,
            observer=observer,
        )
