"""A model folder measured on a text file, alone or against its dense original."""

import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rocket_core.calibration.datasets import LOCAL_SUFFIXES, file_documents
from rocket_core.errors import InvalidConfigError
from rocket_core.evaluation.comparison import (
    EvaluationText,
    Measurement,
    Step,
    compare_models,
    measure_model,
)
from rocket_core.evaluation.drift import sentences
from rocket_core.evaluation.harness import load_tasks
from rocket_core.evaluation.models import ModelFolder, load_model, open_model
from rocket_core.evaluation.windows import text_windows
from rocket_core.models.architecture import window_length
from rocket_core.report.quality import Difference, ModelQuality, TaskScore
from rocket_core.system.devices import resolve_device


class EvaluationResult(BaseModel):
    """How good a model is on a text, with what is needed to repeat the measurement.

    Attributes:
        model: the folder.
        text: the text file as asked for.
        sequence_length: tokens per window; of a sentence at most.
        stride: tokens from one window's begin to the next.
        windows: number of windows; for an encoder of sentences.
        tokens: predicted tokens, each counted once; for an encoder those read.
        negative_log_likelihood: mean over predicted tokens, in nats; None for an encoder.
        perplexity: exp of it; None for an encoder, infinity (null in JSON) where a float cannot hold it.
        tasks: scores of the zero-shot tasks.
        against: the folder of the dense model; None if the model was measured alone.
        dense: the quality of that one.
        difference: how far the model is from it.
        device: where the model ran.
        dtype: dtype in which the model ran.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    text: str
    sequence_length: Annotated[int, Field(ge=2)]
    stride: Annotated[int, Field(ge=1)]
    windows: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    negative_log_likelihood: float | None
    perplexity: float | None
    tasks: tuple[TaskScore, ...] = ()
    against: str | None = None
    dense: ModelQuality | None = None
    difference: Difference | None = None
    device: str
    dtype: str


def _ignore_step(share: float, what: str) -> None:
    """Default of `on_step`."""


def read_text(
    folder: ModelFolder,
    texts: Iterable[str],
    *,
    count: int | None,
    sequence_length: int | None = None,
    stride: int | None = None,
) -> EvaluationText:
    """Prepares documents for a model: overlapping windows where it predicts tokens, sentences where it encodes them.

    Args:
        folder: the model.
        texts: documents; read no further than needed.
        count: windows or sentences, at least 1, fewer if the documents end before; None takes all.
        sequence_length: tokens per window or at most per sentence, from 2 to the model's positions; None takes 1024 or
            the model's positions, whichever is less.
        stride: tokens from one window's begin to the next, from 1 to the length; None is the length.

    Raises:
        InvalidConfigError: the length or the stride is out of range, or an encoder is given a stride.
        EmptyCalibrationError: less than one window, or no sentence.
    """
    length = window_length(folder.config, sequence_length)
    if folder.predicts_tokens:
        windows = text_windows(texts, folder.tokenizer, count=count, length=length, stride=stride)
        return EvaluationText(windows=windows, length=length, stride=length if stride is None else stride)
    if stride is not None:
        raise InvalidConfigError("stride is for models that predict tokens; leave it out for an encoder")
    # Positions of some encoders begin behind those of padding; their tokenizers know how many are left.
    length = min(length, folder.tokenizer.model_max_length)
    found = tuple(islice(sentences(texts), count))
    return EvaluationText(sentences=found, length=length, stride=length)


def evaluate_text(
    folder: Path,
    text: Path,
    *,
    sequence_length: int | None = None,
    limit: int | None = None,
    stride: int | None = None,
    against: Path | None = None,
    tasks: Sequence[str] = (),
    task_items: int | None = None,
    device: str = "auto",
    on_step: Step = _ignore_step,
) -> EvaluationResult:
    """Measures a model folder, dense or compressed, on a text file.

    The documents of the file are joined by the tokenizer's BOS token and cut into consecutive windows; tokens left over
    at the end are dropped. An encoder reads its lines, each as a sentence. Compressed folders need
    `import rocket_core.hf` beforehand. No code of a folder is run, and weights are read from safetensors only. One
    model is in memory at a time; against a dense model, that one's logits lie in a temporary folder (`TMPDIR`) until
    they are compared.

    Args:
        folder: the model with its tokenizer; `rocket_core.checkpoint.find_model` gives that of a repository.
        text: `.txt` (one document) or `.jsonl` with `{"text": ...}` lines.
        sequence_length: tokens per window, from 2 to the model's positions; None takes 1024 or the model's positions,
            whichever is less.
        limit: how many windows or sentences to read from the beginning, >= 1; None reads all.
        stride: tokens from one window's begin to the next; None is the sequence length. Less costs more windows and
            gives tokens more context.
        against: the dense model's folder, whose tokenizer is used; an encoder cannot be measured without.
        tasks: zero-shot tasks, see `rocket_core.evaluation.harness`.
        task_items: items read of each task, >= 1; None reads all.
        device: torch device, or `auto`: the accelerator if there is one.
        on_step: told of the progress with every batch.

    Returns:
        The measurements, with the settings that gave them.

    Raises:
        InvalidConfigError: a setting is out of range, or the harness is asked for and not installed.
        CalibrationError: the text is malformed, or shorter than one window.
        UnknownDatasetError: the text cannot be read.
        ModelNotFoundError: no model in a folder.
        UnsupportedArchitectureError: not a causal language model or encoder that `transformers` loads.
        CheckpointError: weights are missing, damaged or give non-finite outputs.
        InsufficientDiskError: the dense model's logits do not fit.
    """
    for name, value in (("limit", limit), ("task_items", task_items)):
        if value is not None and value < 1:
            raise InvalidConfigError(f"{name} is {value}; it is a number of what is read, at least 1")
    if text.suffix.lower() not in LOCAL_SUFFIXES:
        raise InvalidConfigError(f"{text} is neither a {' nor a '.join(LOCAL_SUFFIXES)} file; rename or convert it")
    target = resolve_device(device)
    model = open_model(folder)
    original = None if against is None else open_model(against)
    if original is None and not model.predicts_tokens:
        raise InvalidConfigError(
            f"{folder} holds an encoder, which has no perplexity; name its dense original to measure the drift from it"
        )
    how = Measurement(
        text=read_text(
            original or model, file_documents(text), count=limit, sequence_length=sequence_length, stride=stride
        ),
        tasks=load_tasks(tasks),
        task_items=task_items,
        device=target,
    )
    return _result(model, original, how, on_step).model_copy(update={"text": str(text)})


def _result(model: ModelFolder, original: ModelFolder | None, how: Measurement, on_step: Step) -> EvaluationResult:
    if original is None:
        measured = measure_model(model, load_model(model, how.device), how, on_step=on_step)
        quality, tokens, dtype = measured.quality, measured.tokens, measured.dtype
        dense = difference = None
    else:
        with tempfile.TemporaryDirectory(prefix="rocket-") as scratch:
            compared = compare_models(original, model, how, scratch=Path(scratch), on_step=on_step)
        quality, tokens, dtype = compared.after, compared.tokens, compared.dtype
        dense, difference = compared.before, compared.difference
    # Without a value only because a float cannot hold it.
    perplexity = float("inf") if quality.negative_log_likelihood and not quality.perplexity else quality.perplexity
    return EvaluationResult(
        model=str(model.path),
        text="",
        sequence_length=how.text.length,
        stride=how.text.stride,
        windows=how.text.count,
        tokens=tokens,
        negative_log_likelihood=quality.negative_log_likelihood,
        perplexity=perplexity,
        tasks=quality.tasks,
        against=None if original is None else str(original.path),
        dense=dense,
        difference=difference,
        device=str(how.device),
        dtype=str(dtype).removeprefix("torch."),
    )
