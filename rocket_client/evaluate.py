"""`rocket evaluate`: how well a model predicts a text."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_client import options
from rocket_client.failures import reported_failures
from rocket_client.progress import hide_library_bars, progress_view

if TYPE_CHECKING:
    from rocket_core.evaluation import EvaluationResult

NAME = "evaluate"


def evaluate(
    *,
    model: options.Model,
    text: options.Text,
    sequence_length: options.SequenceLength = None,
    limit: options.Limit = None,
    device: options.Device = "auto",
    revision: options.Revision = None,
    as_json: options.JsonErrors = False,
) -> None:
    """Measure the perplexity of MODEL on a text, as JSON.

    Documents are joined by the tokenizer's BOS token and cut into windows, each of which is read by itself.
    """
    with reported_failures(as_json=as_json):
        result = _run(
            model,
            text,
            sequence_length=sequence_length,
            limit=limit,
            device=device,
            revision=revision,
            quiet=as_json,
        )
    typer.echo(result.model_dump_json(indent=2))


def _run(
    model: str,
    text: Path,
    *,
    sequence_length: int | None,
    limit: int | None,
    device: str,
    revision: str | None,
    quiet: bool,
) -> "EvaluationResult":
    import rocket_core.hf  # noqa: F401 - teaches transformers to load compressed folders
    from rocket_core.checkpoint import find_model
    from rocket_core.evaluation import evaluate_text

    folder = find_model(model, revision).folder
    hide_library_bars()
    with progress_view(quiet=quiet) as view:

        def show(done: int, total: int) -> None:
            view.show("evaluating", f"{done} of {total} windows", done / total, None)

        result = evaluate_text(
            folder, text, sequence_length=sequence_length, limit=limit, device=device, on_progress=show
        )
    # Of a repository the folder is one in a cache, which means nothing to the user.
    return result.model_copy(update={"model": model})
