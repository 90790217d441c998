"""Reports as notebooks show them: a few small tables."""

import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rocket_core.report.formatting import bytes_text
from rocket_core.report.headlines import headlines
from rocket_core.report.quality import quality_rows
from rocket_core.report.schema import CompressionReport
from rocket_core.report.speed import SPEED_COLUMNS, SpeedReport, speed_rows

_LEFT = ' style="text-align:left"'


def notebook_shell() -> Any | None:
    """Return the shell of the notebook that this process runs for; None if it runs for none."""
    # IPython is imported in every notebook, and nothing else has to be.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if type(shell).__name__ == "ZMQInteractiveShell" else None


def show_in_notebooks() -> None:
    """Register the tables with the notebook that this process runs for; a no-op without one."""
    shell = notebook_shell()
    if shell is not None:
        html = shell.display_formatter.formatters["text/html"]
        html.for_type(CompressionReport, compression_html)
        html.for_type(SpeedReport, speed_html)


def compression_html(report: CompressionReport) -> str:
    """Return a compression's size, quality and time, its files, and what was measured of them."""
    summary = [(one.name, one.value, one.detail) for one in headlines(report)]
    if report.verdict is not None:
        outcome, _, why = report.verdict.text.partition(": ")
        summary.append(("Verdict", outcome, why))
    files = [(report.totals.original_text, bytes_text(report.totals.dense_bytes))]
    files += [(export.kind, bytes_text(export.stored_bytes)) for export in report.exports]
    parts = [
        table_html(f"{report.model}, {report.change_text}", (), summary, words=True),
        table_html("Files", ("export", "size"), files),
    ]
    if report.evaluation is not None:
        columns = ("", "original", report.evaluation.export)
        parts.append(table_html("Quality", columns, quality_rows(report.evaluation)))
    if report.speed is not None:
        parts.append(speed_html(report.speed))
    return "".join(parts)


def speed_html(report: SpeedReport) -> str:
    """Return a measurement of speed as a table."""
    return table_html(f"Speed: {report.conditions}", SPEED_COLUMNS, speed_rows(report))


def table_html(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Return a table; all text is escaped.

    Notebooks align cells to the right and captions to the middle, which suits numbers, but not words.

    Args:
        caption: its caption.
        columns: names of the columns; none for a table without a head.
        rows: texts of each row; the first is its name.
        words: whether cells contain words rather than numbers.
    """
    head = "".join(
        f"<th{_LEFT if words or not place else ''}>{escape(name)}</th>" for place, name in enumerate(columns)
    )
    body = "".join(
        f"<tr>{''.join(_cell(text, place, words=words) for place, text in enumerate(row))}</tr>" for row in rows
    )
    thead = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f"<table><caption{_LEFT}>{escape(caption)}</caption>{thead}<tbody>{body}</tbody></table>"


def _cell(text: str, place: int, *, words: bool) -> str:
    if place == 0:
        return f'<th scope="row"{_LEFT}>{escape(text)}</th>'
    # A short one is the value, which is not to be broken.
    short = ";white-space:nowrap" if place == 1 else ""
    return f'<td style="text-align:{"left" if words else "right"}{short}">{escape(text)}</td>'
