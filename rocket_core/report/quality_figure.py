"""The figure of quality over size, of several compressions of one model. Loads no torch."""

from collections.abc import Iterable

from rocket_core.report.expert_figures import Value
from rocket_core.report.figures import Column, Figure
from rocket_core.report.quality import EvaluationReport
from rocket_core.schema import FrozenModel


class MeasuredModel(FrozenModel):
    """A compression of a model, measured next to its original."""

    name: str
    """how people tell it from the others."""
    address: str
    """page about it."""
    stored_bytes: int
    """bytes of its weights."""
    evaluation: EvaluationReport
    """the measurement."""
    is_marked: bool = False
    """whether the figure is about this one in particular."""

    @property
    def text(self) -> str:
        """What was read; measurements of different texts cannot be compared."""
        return f"{self.evaluation.dataset}, {self.evaluation.tokens:,} tokens, {self.evaluation.text_sha256[:6]}"

    @property
    def perplexity_ratio(self) -> float | None:
        """Perplexity divided by the original's; None if either is unknown."""
        before, after = self.evaluation.before.perplexity, self.evaluation.after.perplexity
        return None if before is None or after is None else after / before


def quality_over_size(model: str, measured: Iterable[MeasuredModel]) -> Figure:
    """Return size and measured quality of compressions of one model.

    Args:
        model: the model.
        measured: the compressions, in any order.
    """
    rows: list[dict[str, Value]] = [
        {
            "name": one.name,
            "model_bytes": one.stored_bytes,
            "kl_divergence": one.evaluation.difference.kl_divergence,
            "perplexity_ratio": one.perplexity_ratio,
            "cosine_drift": one.evaluation.difference.cosine_drift,
            "text": one.text,
            "address": one.address,
            "is_marked": one.is_marked,
        }
        for one in sorted(measured, key=lambda one: one.stored_bytes)
    ]
    measures = ("kl_divergence", "perplexity_ratio", "cosine_drift")
    known = tuple(name for name in measures if any(row[name] is not None for row in rows))
    columns = (
        Column(name="name", title="job", kind="text"),
        Column(name="model_bytes", title="size of all weights", kind="bytes"),
        Column(name="kl_divergence", title="KL divergence from the original, nats per token"),
        Column(name="perplexity_ratio", title="perplexity, in proportion to the original's"),
        Column(name="cosine_drift", title="cosine drift from the original"),
        Column(name="text", title="measured on", kind="text"),
    )
    return Figure(
        name="quality-over-size",
        title=f"Quality over size: {model}",
        note="Each point is an evaluated job and leads to its page; lower and further left is better. Only points of "
        "the same text, which have the same symbol, can be compared.",
        columns=tuple(column for column in columns if column.name not in measures or column.name in known),
        rows=tuple(rows),
        measures=known,
    )
