"""Results of an evaluation, as they appear in reports. Loads no torch."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rocket_core.config import ExportKind
from rocket_core.report.formatting import percent_text
from rocket_core.schema import described

_Share = Annotated[float, Field(ge=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=described)


class TaskScore(_Frozen):
    """A model's accuracy on a zero-shot task.

    Attributes:
        task: name of the task.
        metric: `acc` (largest log-likelihood; for a task without choices: every token is the most likely one) or
            `acc_norm` (the same, normalized by the length of the choice in bytes).
        value: fraction of correct items, [0, 1].
        items: number of items.
    """

    task: str
    metric: str
    value: _Share
    items: Annotated[int, Field(ge=1)]


class ModelQuality(_Frozen):
    """Quality of one model by itself.

    Attributes:
        negative_log_likelihood: mean over the predicted tokens, in nats; None for an encoder.
        perplexity: exp of the negative log-likelihood; None for an encoder, and if it exceeds a float (above 709 nats).
        tasks: scores of the zero-shot tasks, in the requested order.
    """

    negative_log_likelihood: float | None = None
    perplexity: float | None = None
    tasks: tuple[TaskScore, ...] = ()


class Difference(_Frozen):
    """Difference between a compressed model and its dense original on one text.

    Attributes:
        kl_divergence: KL divergence of the compressed model's next-token distribution from the dense model's, mean over
            the predicted tokens, in nats, at least 0; None for an encoder.
        top1_agreement: fraction of the predicted tokens for which both consider the same token most likely, [0, 1];
            None for an encoder.
        cosine_drift: for an encoder: 1 - cos of the two mean-pooled outputs, mean over sentences, [0, 2]; None for a
            model that predicts tokens.
    """

    kl_divergence: Annotated[float, Field(ge=0)] | None = None
    top1_agreement: _Share | None = None
    cosine_drift: Annotated[float, Field(ge=0, le=2)] | None = None


class EvaluationReport(_Frozen):
    """Quality before and after a compression, with what is needed to repeat the measurement.

    Attributes:
        export: the artifact that was measured: factored, or dense if that is the only one.
        dataset: name of the text.
        windows: windows of text that were read; for an encoder, sentences.
        sequence_length: tokens per window; for an encoder, the maximum.
        stride: tokens from the start of one window to the next; `sequence_length` for an encoder.
        tokens: tokens that were predicted, each once; for an encoder, tokens that were read.
        text_sha256: hash of the token ids; for an encoder, of the sentences.
        before: quality of the dense model.
        after: quality of the compressed model.
        difference: difference between the two.
    """

    export: ExportKind
    dataset: str
    windows: Annotated[int, Field(ge=1)]
    sequence_length: Annotated[int, Field(ge=1)]
    stride: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    text_sha256: str
    before: ModelQuality
    after: ModelQuality
    difference: Difference


def quality_rows(evaluation: EvaluationReport) -> list[tuple[str, str, str]]:
    """Return an evaluation as table rows of metric, value before and value after; differences are in the last one."""
    before, after, difference = evaluation.before, evaluation.after, evaluation.difference
    rows: list[tuple[str, str, str]] = []
    if before.negative_log_likelihood is not None:
        rows.append(("perplexity", _number(before.perplexity), _number(after.perplexity)))
    if difference.kl_divergence is not None:
        rows.append(("KL divergence, nats per token", "", f"{difference.kl_divergence:.4f}"))
    if difference.top1_agreement is not None:
        rows.append(("same likeliest token", "", percent_text(difference.top1_agreement)))
    if difference.cosine_drift is not None:
        rows.append(("cosine drift", "", f"{difference.cosine_drift:.4f}"))
    rows += [
        (f"{one.task}, {one.metric} of {one.items}", percent_text(one.value), percent_text(other.value))
        for one, other in zip(before.tasks, after.tasks, strict=True)
    ]
    return rows


def _number(perplexity: float | None) -> str:
    return "beyond e^709" if perplexity is None else f"{perplexity:.4g}"
