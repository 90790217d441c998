"""`rocket evaluate`: perplexity of a model, and its distance from its dense original."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rocket_cli import options
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import hide_library_bars, progress_view
from rocket_cli.report_table import print_evaluation
from rocket_core.system.gc_pause import no_collection
from rocket_core.system.torch_environment import set_torch_defaults

if TYPE_CHECKING:
    from rocket_core.evaluation import EvaluationResult


def evaluate(
    *,
    model: options.Model,
    text: options.Text,
    sequence_length: options.SequenceLength = None,
    limit: options.Limit = None,
    device: options.Device = "auto",
    against: options.Against = None,
    stride: options.Stride = None,
    task: options.Tasks = None,
    task_items: options.TaskItems = None,
    prompt: options.Prompts = None,
    answer_tokens: options.AnswerTokens = None,
    revision: options.Revision = None,
    as_json: options.Json = False,
) -> None:
    """Measure the perplexity of MODEL on a text, and with --against how far it is from the original.

    With --prompt, both models answer it, and the point where the answers diverge is marked.

    Documents are joined by the tokenizer's BOS token and cut into windows. For an encoder, lines are read as sentences,
    and the drift of its pooled outputs is measured.
    """
    settings = {
        "sequence_length": sequence_length,
        "limit": limit,
        "stride": stride,
        "tasks": tuple(task or ()),
        "task_items": task_items,
        "prompts": tuple(prompt or ()),
        "device": device,
    }
    if answer_tokens is not None:
        settings["answer_tokens"] = answer_tokens
    with reported_failures(as_json=as_json):
        result = _run(model, text, against, revision, settings, quiet=as_json)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_evaluation(result)


def _run(
    model: str, text: Path, against: str | None, revision: str | None, settings: dict[str, Any], *, quiet: bool
) -> "EvaluationResult":
    set_torch_defaults(os.environ)
    with no_collection(lasting=True):
        import rocket_core.hf  # noqa: F401 - teaches transformers to load compressed folders
        from rocket_core.checkpoint import find_model
        from rocket_core.evaluation import evaluate_text

    folder = find_model(model, revision).folder
    original = None if against is None else find_model(against).folder
    hide_library_bars()
    with progress_view(quiet=quiet) as view:
        result = evaluate_text(
            folder,
            text,
            against=original,
            on_step=lambda share, what: view.show("evaluating", what, share, None),
            **settings,
        )
    # For a repository, the folder is in a cache and means nothing to the user.
    return result.model_copy(update={"model": model, "against": against})
