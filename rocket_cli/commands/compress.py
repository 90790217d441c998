"""`rocket compress`: compression of a model on this machine."""

import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_cli import options
from rocket_cli.exit_codes import ExitCode, reported_failures
from rocket_cli.progress_view import hide_library_bars, print_line, progress_view
from rocket_cli.report_table import print_report
from rocket_cli.signals import stopping_on_signals
from rocket_core.config import WORK_FOLDER_NAME, CalibrationConfig, CompressionConfig, compression_config
from rocket_core.report.schema import CompressionReport
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.gc_pause import no_collection
from rocket_core.system.threads import set_thread_defaults

if TYPE_CHECKING:
    from rocket_core.pipeline import Progress


_DEFAULTS = CompressionConfig(ratio=0)
_CALIBRATION = CalibrationConfig()

# After these the same command may succeed later, and resumes from the finished layers.
_WORTH_RESUMING = frozenset({ExitCode.MACHINE_TOO_SMALL, ExitCode.TEMPORARY, ExitCode.INTERRUPTED})


def compress(
    *,
    context: typer.Context,
    model: options.Model,
    output: options.Output,
    ratio: options.Ratio = None,
    size: options.Size = None,
    calibration: options.Calibration = _CALIBRATION.dataset,
    samples: options.Samples = _CALIBRATION.samples,
    sequence_length: options.SequenceLength = _CALIBRATION.sequence_length,
    seed: options.Seed = _CALIBRATION.seed,
    preset: options.Preset = None,
    method: options.Method = None,
    objective: options.Objective = None,
    budget: options.Budget = None,
    evaluate: options.EvaluateOn = None,
    evaluate_samples: options.EvaluateSamples = None,
    evaluate_length: options.EvaluateLength = None,
    evaluate_stride: options.EvaluateStride = None,
    task: options.Tasks = None,
    task_items: options.TaskItems = None,
    ignore: options.Ignore = None,
    export: options.Export = None,
    device: options.Device = _DEFAULTS.device,
    dtype: options.Dtype = _DEFAULTS.dtype,
    precision: options.Precision = _DEFAULTS.precision,
    revision: options.Revision = None,
    profiles: options.Profiles = None,
    energy: options.Energy = True,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Compress MODEL, without training, into OUT.

    Ctrl-C stops after the current layer; the same command with --resume continues from there.
    """
    options.require_target(ratio, size)
    command = context.obj or ()
    with reported_failures(as_json=as_json, advice=lambda code: _advice(code, output, command)):
        chosen = {"preset": preset, "method": method, "objective": objective, "budget": budget}
        config = compression_config(
            ratio=ratio,
            target_bytes=size,
            calibration={"dataset": calibration, "samples": samples, "sequence_length": sequence_length, "seed": seed},
            **{name: value for name, value in chosen.items() if value is not None},
            evaluate=options.evaluation(
                dataset=evaluate,
                samples=evaluate_samples,
                sequence_length=evaluate_length,
                stride=evaluate_stride,
                tasks=task,
                task_items=task_items,
            ),
            ignore=tuple(ignore or _DEFAULTS.ignore),
            export=tuple(kind.value for kind in export) if export else _DEFAULTS.export,
            device=device,
            dtype=dtype,
            precision=precision,
        )
        report = _run(
            model, output, config, revision=revision, profiles=profiles, energy=energy, resume=resume, quiet=as_json
        )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, output)


def _run(
    model: str,
    output: Path,
    config: CompressionConfig,
    *,
    revision: str | None,
    profiles: Path | None,
    energy: bool,
    resume: bool,
    quiet: bool,
) -> CompressionReport:
    from rocket_core.inspection.requests import check_request

    # Before torch is imported, which takes seconds.
    check_request(model, config)
    set_thread_defaults(os.environ)
    with EnergyMeter() if energy else nullcontext() as meter:
        # This takes seconds, in which the meter gets ready.
        with no_collection(lasting=True):
            from rocket_core.pipeline import compress as run_pipeline

        cache = None
        if profiles is not None:
            from rocket_core.pipeline import ProfileCache

            cache = ProfileCache(profiles)
        hide_library_bars()
        with progress_view(quiet=quiet) as view, stopping_on_signals(view.announce_stop) as stop:

            def show(progress: "Progress") -> None:
                view.show(progress.stage, progress.layer or "", progress.fraction, progress.seconds_left)

            return run_pipeline(
                model,
                output,
                config,
                revision=revision,
                resume=resume,
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
        print_line(f"finished layers are kept in {output / WORK_FOLDER_NAME}; to go on:")
        typer.echo(f"    {resume_command(arguments)}", err=True)
