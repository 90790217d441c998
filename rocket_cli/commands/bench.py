"""`rocket bench`: tokens per second and memory of models, side by side."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rocket_cli import options
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import progress_view
from rocket_cli.report_table import print_speed
from rocket_core.report.speed import Packing, SpeedReport
from rocket_core.speed import SpeedSettings, Subject, find_subject, measure_speed
from rocket_core.speed.rounds import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT_TOKENS, DEFAULT_ROUNDS
from rocket_core.speed.subjects import GGUF_SUFFIX
from rocket_core.system.torch_environment import set_torch_defaults, thread_count

_Models = Annotated[
    list[str],
    options.argument(
        "MODEL",
        "Folders, .gguf files or folders with one, or repositories on the Hugging Face Hub; the others are "
        "compared with the first.",
        shown=False,
    ),
]
_PromptTokens = Annotated[int | None, options.option("N", "Tokens of the prompt.", f"{DEFAULT_PROMPT_TOKENS}, or less")]
_NewTokens = Annotated[int | None, options.option("N", "Tokens to generate.", f"{DEFAULT_NEW_TOKENS}, or less")]
_Rounds = Annotated[int, options.option("N", "Rounds in which every model is measured once.")]
_Threads = Annotated[int | None, options.option("N", "Threads on the processor.", "OMP_NUM_THREADS, or all processors")]
_Packed = Annotated[
    bool | None,
    options.option(
        None,
        "Hold compressed layers of Rocket's artifacts packed, or dense.",
        "what is fastest",
        name="--packed/--unpacked",
    ),
]


def bench(
    *,
    models: _Models,
    prompt_tokens: _PromptTokens = None,
    new_tokens: _NewTokens = None,
    rounds: _Rounds = DEFAULT_ROUNDS,
    threads: _Threads = None,
    device: options.Device = "auto",
    packed: _Packed = None,
    as_json: options.Json = False,
) -> None:
    """Measure how fast models read a prompt and generate, and how much memory they take.

    They take turns, each in its own process; ratios are relative to the first. Files for llama.cpp need `pip install
    xllamacpp`.
    """
    with reported_failures(as_json=as_json):
        set_torch_defaults(os.environ)
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
    found = [None if _is_repository(model) else find_subject(Path(model), model, packing) for model in models]
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    subjects = [subject or _fetch(model, packing) for model, subject in zip(models, found, strict=True)]
    with progress_view(quiet=quiet) as view:
        return measure_speed(
            subjects, settings, on_step=lambda share, what: view.show("measuring speed", what, share, None)
        )


def _is_repository(model: str) -> bool:
    if Path(model).expanduser().exists() or model.endswith(GGUF_SUFFIX):
        return False
    from rocket_core.hub.repository import check_repository_id

    check_repository_id(model)
    return True


def _fetch(model: str, packing: Packing) -> Subject:
    # This imports torch, which takes seconds.
    from rocket_core.checkpoint import find_model

    return find_subject(find_model(model).folder, model, packing)
