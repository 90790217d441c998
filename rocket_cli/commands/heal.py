"""`rocket heal`: training of an artifact towards the model that it was made from."""

from functools import partial
from pathlib import Path

import typer

from rocket_cli import options
from rocket_cli.exit_codes import reported_failures
from rocket_cli.local_run import local_run
from rocket_cli.report_table import print_healing
from rocket_cli.resuming import advise_to_resume
from rocket_core.config import BUILTIN_DATASET, DEFAULT_HEALING_TOKENS, HealingConfig, healing_config
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.report.healing import HealingReport


def heal(
    *,
    context: typer.Context,
    artifact: options.HealedFrom,
    output: options.Output,
    tokens: options.HealingTokens = DEFAULT_HEALING_TOKENS,
    calibration: options.Calibration = BUILTIN_DATASET,
    sequence_length: options.SequenceLength = None,
    seed: options.Seed = 0,
    calibration_column: options.Column = None,
    skip_bad_rows: options.SkipBadRows = False,
    model: options.Original = None,
    revision: options.Revision = None,
    device: options.Device = "auto",
    energy: options.Energy = True,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train the numbers that ARTIFACT stores on text, and write it to OUT, in the same format and size.

    Minimises the divergence from the predictions of the model that it was made from, which needs memory for both.
    Ctrl-C stops after the current step; the same command with --resume continues from there.
    """
    advise = partial(advise_to_resume, output, context.obj or (), "heal", "the last checkpoint is")
    with reported_failures(as_json=as_json, advice=advise):
        config = healing_config(
            tokens=tokens,
            dataset=calibration,
            column=calibration_column,
            skip_bad_rows=skip_bad_rows,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
        )
        # Before torch is imported, which takes seconds.
        local_path_of(calibration)
        report = _run(artifact, output, config, (model, revision), energy=energy, resume=resume, quiet=as_json)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_healing(report, output)


def _run(
    artifact: Path,
    output: Path,
    config: HealingConfig,
    original: tuple[str | None, str | None],
    *,
    energy: bool,
    resume: bool,
    quiet: bool,
) -> HealingReport:
    with local_run(energy=energy, quiet=quiet) as (meter, observer):
        from rocket_core.pipeline import heal as run_pipeline

        return run_pipeline(
            artifact,
            output,
            config,
            model=original[0],
            revision=original[1],
            resume=resume,
            meter=meter,
            observer=observer,
        )
