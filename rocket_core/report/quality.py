"""Results of an evaluation, as they appear in reports. Loads no torch."""

from typing import Annotated

from pydantic import Field

from rocket_core.engines import NamedExport
from rocket_core.report.answers import ComparedAnswer
from rocket_core.report.formatting import percent_text
from rocket_core.schema import FrozenModel

_Share = Annotated[float, Field(ge=0, le=1)]


class TaskScore(FrozenModel):
    """A model's accuracy on a zero-shot task."""

    task: str
    """name of the task."""
    metric: str
    """`acc` (largest log-likelihood; for a task without choices: every token is the most likely one) or `acc_norm` (the
    same, normalized by the length of the choice in bytes).
    """
    value: _Share
    """fraction of correct items, [0, 1]."""
    items: Annotated[int, Field(ge=1)]
    """number of items."""


class ModelQuality(FrozenModel):
    """Quality of one model by itself."""

    negative_log_likelihood: float | None = None
    """mean over the predicted tokens, in nats; None for an encoder."""
    perplexity: float | None = None
    """exp of the negative log-likelihood; None for an encoder, and if it exceeds a float (above 709 nats)."""
    tasks: tuple[TaskScore, ...] = ()
    """scores of the zero-shot tasks, in the requested order."""


class Difference(FrozenModel):
    """Difference between a compressed model and its dense original on one text."""

    kl_divergence: Annotated[float, Field(ge=0)] | None = None
    """KL divergence of the compressed model's next-token distribution from the dense model's, mean over the predicted
    tokens, in nats, at least 0; None for an encoder.
    """
    top1_agreement: _Share | None = None
    """fraction of the predicted tokens for which both consider the same token most likely, [0, 1]; None for an encoder.
    """
    cosine_drift: Annotated[float, Field(ge=0, le=2)] | None = None
    """for an encoder: 1 - cos of the two mean-pooled outputs, mean over sentences, [0, 2]; for a decoder without a head
    that predicts tokens, of the two outputs for the last token; None for a model that predicts tokens.
    """


class EvaluationReport(FrozenModel):
    """Quality before and after a compression, with what is needed to repeat the measurement."""

    export: NamedExport
    """the artifact that was measured: rocket, or dense if that is the only one."""
    dataset: str
    """name of the text."""
    windows: Annotated[int, Field(ge=1)]
    """windows of text that were read; for an encoder, sentences."""
    sequence_length: Annotated[int, Field(ge=1)]
    """tokens per window; for an encoder, the maximum."""
    stride: Annotated[int, Field(ge=1)]
    """tokens from the start of one window to the next; `sequence_length` for an encoder."""
    tokens: Annotated[int, Field(ge=1)]
    """tokens that were predicted, each once; for an encoder, tokens that were read."""
    text_sha256: str
    """hash of the token ids; for an encoder, of the sentences."""
    before: ModelQuality
    """quality of the dense model."""
    after: ModelQuality
    """quality of the compressed model."""
    difference: Difference
    """difference between the two."""
    answers: tuple[ComparedAnswer, ...] = ()
    """answers of both models to the prompts, in the requested order; empty if none were given, and in reports from
    before this field existed.
    """


def quality_rows(evaluation: EvaluationReport) -> list[tuple[str, str, str]]:
    """Return an evaluation as table rows of metric, value before and value after; differences are in the last one."""
    return compared_rows(evaluation.before, evaluation.after, evaluation.difference)


def compared_rows(
    before: ModelQuality | None, after: ModelQuality, difference: Difference = Difference()
) -> list[tuple[str, str, str]]:
    """Return the quality of one or two models as table rows of metric, value before and value after.

    Args:
        before: quality of the original; None if it was not measured.
        after: quality of the other model.
        difference: difference between the two, shown after.
    """
    rows: list[tuple[str, str, str]] = []
    if after.negative_log_likelihood is not None:
        rows.append(("perplexity", "" if before is None else _number(before.perplexity), _number(after.perplexity)))
    if difference.kl_divergence is not None:
        rows.append(("KL divergence, nats per token", "", f"{difference.kl_divergence:.4f}"))
    if difference.top1_agreement is not None:
        rows.append(("same likeliest token", "", percent_text(difference.top1_agreement)))
    if difference.cosine_drift is not None:
        rows.append(("cosine drift", "", f"{difference.cosine_drift:.4f}"))
    scores = [None] * len(after.tasks) if before is None else before.tasks
    rows += [
        (
            f"{other.task}, {other.metric} of {other.items}",
            "" if one is None else percent_text(one.value),
            percent_text(other.value),
        )
        for one, other in zip(scores, after.tasks, strict=True)
    ]
    return rows


def _number(perplexity: float | None) -> str:
    return "beyond e^709" if perplexity is None else f"{perplexity:.4g}"
