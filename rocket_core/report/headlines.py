"""Summary of a compression in three numbers: size, quality, time."""

from rocket_core.report.figures import ERROR_NAMES
from rocket_core.report.formatting import bytes_text, duration_text, percent_text
from rocket_core.report.quality import quality_rows
from rocket_core.report.schema import CompressionReport
from rocket_core.schema import FrozenModel


class Headline(FrozenModel):
    """One of the three numbers."""

    name: str
    """what is measured."""
    value: str
    """the value after the compression."""
    detail: str
    """the value before, and how it was determined."""


def headlines(report: CompressionReport) -> tuple[Headline, Headline, Headline]:
    """Return the size, quality and time of a compression."""
    return _size(report), _quality(report), _time(report)


def _size(report: CompressionReport) -> Headline:
    totals = report.totals
    saved = 1 - totals.stored_bytes / totals.dense_bytes if totals.dense_bytes else 0.0
    change = f"{percent_text(saved)} less" if saved >= 0 else f"{percent_text(-saved)} more"
    return Headline(
        name="Size",
        value=bytes_text(totals.stored_bytes),
        detail=f"was {bytes_text(totals.dense_bytes)}, {change}; {report.change_text}",
    )


def _quality(report: CompressionReport) -> Headline:
    evaluation = report.evaluation
    if evaluation is None:
        error = report.allocation.total_error
        return Headline(
            name="Quality",
            value=f"{error:.3g}",
            detail=f"predicted, not measured: {ERROR_NAMES[report.allocation.objective]}. Ask for an evaluation to "
            "measure it",
        )
    name, before, after = quality_rows(evaluation)[0]
    was = f"was {before}; " if before else ""
    return Headline(
        name="Quality", value=after, detail=f"{name}, {was}{evaluation.tokens:,} tokens of {evaluation.dataset}"
    )


def _time(report: CompressionReport) -> Headline:
    detail = f"with at most {bytes_text(report.peak_memory_bytes)} of memory"
    if report.energy_text is not None:
        detail += f" and {report.energy_text}"
    return Headline(name="Time", value=duration_text(report.seconds), detail=detail)
