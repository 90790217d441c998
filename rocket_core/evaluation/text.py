"""Evaluation of a model folder on a text file, alone or against its dense original."""

import math
import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from rocket_core.calibration.chats import RowReader
from rocket_core.calibration.datasets import file_documents
from rocket_core.config import EvaluationConfig
from rocket_core.errors import InvalidConfigError
from rocket_core.evaluation.answers import read_prompts
from rocket_core.evaluation.comparison import (
    Comparison,
    EvaluationText,
    Measurement,
    Step,
    compare_models,
    measure_model,
)
from rocket_core.evaluation.drift import sentences
from rocket_core.evaluation.harness import load_tasks
from rocket_core.evaluation.models import ModelFolder, gguf_files, load_model, open_gguf, open_model
from rocket_core.evaluation.windows import text_windows
from rocket_core.inspection.files.dataset_names import LOCAL_FILES
from rocket_core.inspection.files.safetensors_headers import local_weight_files
from rocket_core.inspection.files.text_rows import text_suffix
from rocket_core.models.architecture import window_length
from rocket_core.report.answers import ComparedAnswer
from rocket_core.report.formatting import bytes_text
from rocket_core.report.notebook import table_html
from rocket_core.report.quality import Difference, ModelQuality, TaskScore, compared_rows
from rocket_core.schema import FrozenModel
from rocket_core.system.devices import resolve_device


class EvaluationResult(FrozenModel):
    """The quality of a model on a text, with the settings needed to repeat the measurement."""

    # For the perplexity.
    model_config = ConfigDict(allow_inf_nan=True)

    model: str
    """the model folder."""
    file_bytes: Annotated[int, Field(ge=0)]
    """bytes of its files of weights."""
    text: str
    """the text file as given."""
    sequence_length: Annotated[int, Field(ge=2)]
    """tokens per window; for an encoder, maximum tokens per sentence."""
    stride: Annotated[int, Field(ge=1)]
    """tokens from the start of one window to the next."""
    windows: Annotated[int, Field(ge=1)]
    """number of windows; for an encoder, number of sentences."""
    tokens: Annotated[int, Field(ge=1)]
    """predicted tokens, each counted once; for an encoder, tokens read."""
    negative_log_likelihood: float | None
    """mean over predicted tokens, in nats; None for an encoder."""
    perplexity: float | None
    """exp of `negative_log_likelihood`; None for an encoder; infinity (null in JSON) on overflow."""
    tasks: tuple[TaskScore, ...] = ()
    """scores of the zero-shot tasks."""
    against: str | None = None
    """the folder of the dense model; None if the model was measured alone."""
    against_bytes: Annotated[int, Field(ge=0)] | None = None
    """bytes of the dense model's files of weights."""
    dense: ModelQuality | None = None
    """the quality of the dense model."""
    difference: Difference | None = None
    """the distance of the model from the dense model."""
    answers: tuple[ComparedAnswer, ...] = ()
    """answers of both models to the prompts."""
    device: str
    """device that the model ran on."""
    dtype: str
    """dtype that the model ran in."""

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        columns, rows = self.table()
        return table_html(self.caption, ("", *columns), rows)

    @property
    def caption(self) -> str:
        """What was read."""
        return f"{self.tokens:,} {'tokens' if self.perplexity is not None else 'tokens read'} of {self.text}"

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return names of the models, the original first, and rows of a measure and its value for each model."""
        original = "" if self.against_bytes is None else bytes_text(self.against_bytes)
        rows = [
            ("file", original, bytes_text(self.file_bytes)),
            *compared_rows(self.dense, self.quality, self.difference or Difference()),
        ]
        if self.against is None:
            return (self.model,), [(measure, value) for measure, _, value in rows]
        return (self.against, self.model), [*rows]

    @property
    def quality(self) -> ModelQuality:
        """The quality of the model."""
        overflowed = self.perplexity is None or math.isinf(self.perplexity)
        return ModelQuality(
            negative_log_likelihood=self.negative_log_likelihood,
            perplexity=None if overflowed else self.perplexity,
            tasks=self.tasks,
        )


def read_text(
    folder: ModelFolder,
    texts: Iterable[str],
    *,
    count: int | None,
    sequence_length: int | None = None,
    stride: int | None = None,
) -> EvaluationText:
    """Prepare documents for a model: windows if it predicts tokens, sentences if it is an encoder.

    Args:
        folder: the model.
        texts: documents; read no further than needed.
        count: number of windows or sentences, at least 1; fewer if the documents run out. None takes all.
        sequence_length: tokens per window, or maximum tokens per sentence, from 2 to the model's positions; None takes
            1024 or the model's positions, whichever is less.
        stride: tokens from the start of one window to the next, from 1 to the length; None is the length.

    Raises:
        InvalidConfigError: the length or the stride is out of range, or a stride is given for an encoder.
        EmptyCalibrationError: the text does not fill one window, or has no sentence.
    """
    length = window_length(folder.config, sequence_length)
    if folder.predicts_tokens:
        windows = text_windows(texts, folder.tokenizer, count=count, length=length, stride=stride)
        return EvaluationText(windows=windows, length=length, stride=length if stride is None else stride)
    if stride is not None:
        raise InvalidConfigError("stride is for models that predict tokens; leave it out for others")
    # Some encoders reserve positions for padding; their tokenizers know how many are left.
    length = min(length, folder.tokenizer.model_max_length)
    texts_read = tuple(islice(sentences(texts), count))
    return EvaluationText(sentences=texts_read, length=length, stride=length)


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
    prompts: Sequence[str] = (),
    answer_tokens: int = EvaluationConfig().answer_tokens,
    device: str = "auto",
    on_step: Step = lambda _share, _what: None,
) -> EvaluationResult:
    """Evaluate a model folder, dense or compressed, on a text file.

    The documents of the file are joined by the tokenizer's BOS token and cut into consecutive windows; tokens left over
    at the end are dropped. An encoder reads each line as a sentence. No code from a folder is run. Weights are read
    from safetensors, or from the folder's GGUF file, for which configuration and tokenizer are those of the dense
    model. One model is in memory at a time; when comparing with a dense model, its logits are stored in a temporary
    folder (`TMPDIR`) until they are compared.

    Args:
        folder: the model with its tokenizer; for a repository, see `rocket_core.checkpoint.find_model`.
        text: `.txt` (one document) or `.jsonl` with `{"text": ...}` lines.
        sequence_length: tokens per window, from 2 to the model's positions; None takes 1024 or the model's positions,
            whichever is less.
        limit: number of windows or sentences to read from the beginning, >= 1; None reads all.
        stride: tokens from the start of one window to the next; None is the sequence length. A smaller stride gives
            tokens more context and costs more windows.
        against: the dense model's folder, whose tokenizer is used; required for an encoder and for a GGUF file.
        tasks: zero-shot tasks, see `rocket_core.evaluation.harness`.
        task_items: items read of each task, >= 1; None reads all.
        prompts: prompts that both models answer with the most likely token each time; require `against`.
        answer_tokens: tokens of the longest answer, >= 1.
        device: torch device, or `auto` for the accelerator if there is one.
        on_step: called with the progress on every batch.

    Returns:
        The measurements, with the settings used.

    Raises:
        InvalidConfigError: a setting is out of range, or tasks are requested and the harness is not installed.
        CalibrationError: the text is malformed, or shorter than one window.
        UnknownDatasetError: the text cannot be read.
        ModelNotFoundError: a folder contains no model.
        UnsupportedArchitectureError: not a causal language model or encoder that `transformers` loads.
        CheckpointError: weights are missing, damaged or give non-finite outputs.
        InsufficientDiskError: the dense model's logits do not fit.
    """
    for name, value in (("limit", limit), ("task_items", task_items), ("answer_tokens", answer_tokens)):
        if value is not None and value < 1:
            raise InvalidConfigError(f"{name} is {value}; it is a number of what is read, at least 1")
    if text_suffix(text) is None:
        raise InvalidConfigError(f"{text} is not a {LOCAL_FILES} file; rename or convert it")
    target = resolve_device(device)
    original = None if against is None else open_model(against)
    if gguf_files(folder):
        if original is None:
            raise InvalidConfigError(
                f"{folder} has a GGUF file, which is read with the configuration and the tokenizer of its dense "
                "original; name that to measure the distance from it"
            )
        model = open_gguf(folder, original)
    else:
        model = open_model(folder)
    if original is None and prompts:
        raise InvalidConfigError("prompts are answered by a model and its dense original: name that as well")
    if original is None and not model.predicts_tokens:
        raise InvalidConfigError(
            f"{folder} predicts no tokens and has no perplexity; name its dense original to measure the drift from it"
        )
    how = Measurement(
        text=read_text(
            original or model,
            file_documents(text, RowReader(tokenizer=(original or model).tokenizer)),
            count=limit,
            sequence_length=sequence_length,
            stride=stride,
        ),
        tasks=load_tasks(tasks),
        task_items=task_items,
        prompts=read_prompts(original or model, prompts, answer_tokens),
        answer_tokens=answer_tokens,
        device=target,
    )
    return _result(model, original, how, on_step).model_copy(update={"text": str(text)})


def _result(model: ModelFolder, original: ModelFolder | None, how: Measurement, on_step: Step) -> EvaluationResult:
    if original is None:
        loaded = load_model(model, how.device)
        quality = measure_model(model, loaded, how, on_step=on_step)
        compared = Comparison(
            after=quality, difference=Difference(), tokens=how.text.predicted_tokens, dtype=loaded.dtype
        )
    else:
        with tempfile.TemporaryDirectory(prefix="rocket-") as scratch:
            compared = compare_models(original, model, how, scratch=Path(scratch), on_step=on_step)
        quality = compared.after
    # A missing perplexity of a decoder means that it overflowed.
    perplexity = float("inf") if quality.negative_log_likelihood and not quality.perplexity else quality.perplexity
    return EvaluationResult(
        model=str(model.path),
        file_bytes=_file_bytes(model),
        text="",
        sequence_length=how.text.length,
        stride=how.text.stride,
        windows=how.text.count,
        tokens=compared.tokens,
        negative_log_likelihood=quality.negative_log_likelihood,
        perplexity=perplexity,
        tasks=quality.tasks,
        against=None if original is None else str(original.path),
        against_bytes=None if original is None else _file_bytes(original),
        dense=None if original is None else compared.before,
        difference=None if original is None else compared.difference,
        answers=compared.answers,
        device=str(how.device),
        dtype=str(compared.dtype).removeprefix("torch."),
    )


def _file_bytes(model: ModelFolder) -> int:
    files = (
        local_weight_files(model.path, str(model.path)) if model.gguf_file is None else [model.path / model.gguf_file]
    )
    return sum(file.stat().st_size for file in files)
