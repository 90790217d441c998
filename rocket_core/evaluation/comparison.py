"""Comparison of a dense model and its compressed version on the same text.

Only one model is in memory at a time. The dense model's logits are stored in a scratch folder, in its own dtype
(predicted tokens x vocabulary), each window's until it has been compared. For an encoder only the pooled outputs are
stored, in memory.
"""

import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from rocket_core.config import EvaluationConfig
from rocket_core.errors import InvalidConfigError
from rocket_core.evaluation.answers import DenseAnswers, Prompt, answer_densely, compare_answers
from rocket_core.evaluation.divergence import DivergenceSum, token_divergence
from rocket_core.evaluation.drift import mean_cosine_drift, pooled_outputs
from rocket_core.evaluation.harness import Task, score_tasks
from rocket_core.evaluation.likelihood import summarize_likelihood, surprise
from rocket_core.evaluation.logit_store import LogitStore
from rocket_core.evaluation.models import ModelFolder, check_token_ids, load_model
from rocket_core.evaluation.windows import Prediction, batch_size, counted_tokens, predictions
from rocket_core.inspection.checks.prompts import cannot_score
from rocket_core.models.architecture import window_length
from rocket_core.report.answers import ComparedAnswer
from rocket_core.report.quality import Difference, ModelQuality
from rocket_core.system.process_memory import return_freed_memory

_SENTENCES_PER_BATCH = 32
# Share of a model's progress until the prompts, if there are any.
_TEXT_SHARE = 0.7

Step = Callable[[float, str], None]
"""Called with the fraction done, from 0 to 1, and a description of the step; may raise to stop the evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationText:
    """The text that models are measured on, as either windows or sentences.

    Attributes:
        windows: token ids for a model that predicts them; each window starts `stride` tokens after the previous one.
        sentences: sentences for an encoder.
        length: tokens per window, or maximum tokens per sentence.
        stride: tokens from the start of one window to the next.
    """

    windows: Int64[Tensor, "windows length"] | None = None
    sentences: tuple[str, ...] = ()
    length: int
    stride: int

    @property
    def count(self) -> int:
        """Number of windows or sentences."""
        return len(self.sentences) if self.windows is None else len(self.windows)

    @property
    def predicted_tokens(self) -> int:
        """Number of predicted tokens, each counted once; 0 for an encoder."""
        return 0 if self.windows is None else counted_tokens(self.count, self.length, self.stride)

    @property
    def sha256(self) -> str:
        """Hash of the token ids, or of the sentences."""
        digest = hashlib.sha256()
        if self.windows is None:
            digest.update("\n".join(self.sentences).encode())
        else:
            digest.update(self.windows.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The measurements of two models.

    Attributes:
        before: quality of the dense model; nothing is known of an encoder by itself.
        after: quality of the compressed model.
        difference: difference between the two.
        tokens: predicted tokens, each counted once; for an encoder, tokens read.
        dtype: dtype that the compressed model ran in.
        answers: answers of both to the prompts.
    """

    before: ModelQuality = field(default_factory=ModelQuality)
    after: ModelQuality
    difference: Difference
    tokens: int
    dtype: torch.dtype
    answers: tuple[ComparedAnswer, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The settings of a measurement.

    Attributes:
        text: the text.
        tasks: zero-shot tasks.
        task_items: items of each task; None takes all.
        prompts: prompts that both models answer.
        answer_tokens: tokens of the longest answer.
        device: device that the models run on.
    """

    text: EvaluationText
    tasks: tuple[Task, ...] = ()
    task_items: int | None = None
    prompts: tuple[Prompt, ...] = ()
    answer_tokens: int = EvaluationConfig().answer_tokens
    device: torch.device

    @property
    def stored_tokens(self) -> int:
        """Most tokens whose predictions by the dense model are stored."""
        return self.text.predicted_tokens + len(self.prompts) * self.answer_tokens


def compare_models(
    dense: ModelFolder, compressed: ModelFolder, how: Measurement, *, scratch: Path, on_step: Step
) -> Comparison:
    """Measure two models on the same text and tasks.

    Takes memory for one model, the logits of one batch (256 MiB or those of one window) and the float64 copies of a
    chunk of tokens (`copied_bytes`), and disk space for the dense model's logits.

    Args:
        dense: the dense model.
        compressed: the compressed model; its tokenizer is not used.
        how: the settings of the measurement.
        scratch: an empty folder.
        on_step: called for every batch.

    Raises:
        InvalidConfigError: the models do not predict the same tokens, or tasks are requested for an encoder.
        InsufficientDiskError: the logits do not fit on disk.
        CheckpointError: a model's weights are damaged, or its outputs are not finite.
    """
    if dense.predicts_tokens != compressed.predicts_tokens:
        raise InvalidConfigError(
            f"{compressed.path} and {dense.path} are models of different kinds; compare a model with its own original"
        )
    if not dense.predicts_tokens:
        return _compare_encoders(dense, compressed, how, on_step)
    store = LogitStore(scratch, how.stored_tokens)
    before, answered = _read_dense(dense, how, store, _part(on_step, 0, "dense"))
    return_freed_memory()
    compared = _read_compressed(compressed, dense, how, store, answered, _part(on_step, 1, "compressed"))
    return replace(compared, before=before)


def measure_model(
    folder: ModelFolder,
    model: PreTrainedModel,
    how: Measurement,
    *,
    on_step: Step,
    on_prediction: Callable[[Prediction], None] = lambda _prediction: None,
) -> ModelQuality:
    """Measure one loaded causal language model.

    Args:
        folder: the model's folder.
        model: on its device.
        how: the settings of the measurement.
        on_step: called for every batch.
        on_prediction: called with the predictions of each window.
    """
    text = how.text
    assert text.windows is not None
    check_token_ids(folder, model, int(text.windows.max()))
    share = 0.5 if how.tasks else 1.0

    def on_window(done: int, total: int) -> None:
        on_step(share * done / total, f"{done} of {total} windows")

    def on_continuation(done: int, total: int) -> None:
        on_step(share + (1 - share) * done / total, f"tasks, {done} of {total} continuations")

    total: list[float] = []
    size = batch_size(folder.config, text.length)
    for prediction in predictions(model, text.windows, stride=text.stride, batch_size=size, on_progress=on_window):
        total.append(surprise(prediction))
        on_prediction(prediction)
    likelihood = summarize_likelihood(math.fsum(total), text.predicted_tokens, text.count)
    tasks = score_tasks(
        model,
        folder.tokenizer,
        how.tasks,
        items=how.task_items,
        batch_size=batch_size(folder.config, window_length(folder.config, None)),
        on_progress=on_continuation,
    )
    return ModelQuality(
        negative_log_likelihood=likelihood.negative_log_likelihood,
        perplexity=likelihood.perplexity if math.isfinite(likelihood.perplexity) else None,
        tasks=tasks,
    )


def _read_dense(
    dense: ModelFolder, how: Measurement, store: LogitStore, on_step: Step
) -> tuple[ModelQuality, DenseAnswers]:
    # A local variable, so that the model's memory is freed when this returns.
    model = load_model(dense, how.device)
    on_text, on_token = _steps(how, on_step)
    quality = measure_model(dense, model, how, on_step=on_text, on_prediction=store.put)
    answered = answer_densely(
        dense,
        model,
        how.prompts,
        how.answer_tokens,
        on_token=on_token,
        on_prediction=lambda prediction: store.put(_after_text(prediction, how)),
    )
    return quality, answered


def _read_compressed(
    compressed: ModelFolder,
    dense: ModelFolder,
    how: Measurement,
    store: LogitStore,
    answered: DenseAnswers,
    on_step: Step,
) -> Comparison:
    """Measure the compressed model, and compare it with what was stored of the dense one, whose quality is left out."""
    model = load_model(compressed, how.device)
    sums: list[DivergenceSum] = []
    on_text, on_token = _steps(how, on_step)

    def compare(prediction: Prediction) -> None:
        sums.append(token_divergence(store.take(prediction), prediction.logits))

    # One tokenizer for both, so that the tasks are the same.
    folder = replace(compressed, tokenizer=dense.tokenizer)
    quality = measure_model(folder, model, how, on_step=on_text, on_prediction=compare)
    answers = compare_answers(
        dense.tokenizer,
        model,
        how.prompts,
        answered,
        how.answer_tokens,
        on_token=on_token,
        take_dense=lambda prediction: store.take(_after_text(prediction, how)),
    )
    total = functools.reduce(operator.add, sums)
    difference = Difference(
        # Rounding may leave the sum for nearly equal distributions slightly below 0.
        kl_divergence=max(0.0, total.kl_divergence / total.tokens),
        top1_agreement=total.agreements / total.tokens,
    )
    return Comparison(
        after=quality, difference=difference, tokens=how.text.predicted_tokens, dtype=model.dtype, answers=answers
    )


def _after_text(prediction: Prediction, how: Measurement) -> Prediction:
    """Return the predictions of an answer, numbered after the windows of text."""
    return replace(prediction, window=how.text.count + prediction.window)


def _steps(how: Measurement, on_step: Step) -> tuple[Step, Callable[[], None]]:
    """Return what reports one model's progress through the text and the tasks, and then token by token of its answers.

    Args:
        how: the settings of the measurement.
        on_step: called at every step.
    """
    text_share = _TEXT_SHARE if how.prompts else 1.0
    tokens = len(how.prompts) * how.answer_tokens
    answered = itertools.count(1)

    def on_text(share: float, what: str) -> None:
        on_step(text_share * share, what)

    def on_token() -> None:
        on_step(text_share + (1 - text_share) * (next(answered) / tokens), "answers")

    return on_text, on_token


def _compare_encoders(dense: ModelFolder, compressed: ModelFolder, how: Measurement, on_step: Step) -> Comparison:
    if how.tasks:
        raise cannot_score(str(dense.path))
    before, tokens, _ = _pool(dense, dense, how, _part(on_step, 0, "dense"))
    return_freed_memory()
    after, _, dtype = _pool(compressed, dense, how, _part(on_step, 1, "compressed"))
    if before.shape != after.shape:
        raise InvalidConfigError(
            f"the dense model's outputs have {before.shape[1]} numbers and the compressed one's {after.shape[1]}; "
            "compare a model with its own original"
        )
    difference = Difference(cosine_drift=mean_cosine_drift(before, after))
    return Comparison(after=ModelQuality(), difference=difference, tokens=tokens, dtype=dtype)


def _pool(
    folder: ModelFolder, dense: ModelFolder, how: Measurement, on_step: Step
) -> tuple[Float[Tensor, "sentences hidden"], int, torch.dtype]:
    model = load_model(folder, how.device)
    vectors, tokens = pooled_outputs(
        model,
        dense.tokenizer,
        how.text.sentences,
        length=how.text.length,
        batch_size=_SENTENCES_PER_BATCH,
        on_progress=lambda done, total: on_step(done / total, f"{done} of {total} sentences"),
    )
    return vectors, tokens, model.dtype


def _part(on_step: Step, index: int, model: str) -> Step:
    """Return a step function for one of the two models, scaled to its half of the progress."""
    return lambda share, what: on_step((index + share) / 2, f"{model}, {what}")
