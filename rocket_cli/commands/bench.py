"""`rocket bench`: tokens per second and memory of models, side by side."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_cli import options
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import progress_view
from rocket_cli.report_table import print_speed
from rocket_core.inspection.hub import check_repository_id
from rocket_core.report.speed import Packing, SpeedReport
from rocket_core.speed import SpeedSettings, Subject, find_subject, measure_speed
from rocket_core.speed.rounds import DEFAULT_ROUNDS
from rocket_core.speed.subjects import GGUF_SUFFIX
from rocket_core.system.threads import set_thread_defaults, thread_count

if TYPE_CHECKING:
    from rocket_core.checkpoint import ModelSource


def bench(
    *,
    models: options.BenchModels,
    prompt_tokens: options.PromptTokens = None,
    new_tokens: options.NewTokens = None,
    rounds: options.Rounds = DEFAULT_ROUNDS,
    threads: options.Threads = None,
    device: options.Device = "auto",
    packed: options.Packed = None,
    as_json: options.Json = False,
) -> None:
    """Measure how fast MODELS read a prompt and generate, and the memory that they take.

    They take turns, each in a process of its own; ratios are to the first one. Files for llama.cpp need `pip install
    xllamacpp`.
    """
    with reported_failures(as_json=as_json):
        set_thread_defaults(os.environ)
        settings = SpeedSettings(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            threads=thread_count(os.environ) if threads is None else threads,
            device=device,
        )
        report = _run(models, settings, "default" if packed is None else "packed" if packed else "unpacked", as_json)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_speed(report)


def _run(models: list[str], settings: SpeedSettings, packing: Packing, quiet: bool) -> SpeedReport:
    # What is here or misspelled is found before anything is downloaded.
    found = {model: None if _is_repository(model) else find_subject(Path(model), model, packing) for model in models}
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    subjects = [_fetch(model, packing) if subject is None else subject for model, subject in found.items()]
    with progress_view(quiet=quiet) as view:
        return measure_speed(
            subjects, settings, on_step=lambda share, what: view.show("measuring speed", what, share, None)
        )


def _is_repository(model: str) -> bool:
    if Path(model).expanduser().exists() or model.endswith(GGUF_SUFFIX):
        return False
    check_repository_id(model)
    return True


def _fetch(model: str, packing: Packing) -> Subject:
    # This imports torch, which takes seconds.
    from rocket_core.checkpoint import find_model

    source: ModelSource = find_model(model)
    return find_subject(source.folder, model, packing)
