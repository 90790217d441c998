"""Reports as notebooks show them: a few small tables."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from rocket_core.report.formatting import bytes_text
from rocket_core.report.headlines import headlines
from rocket_core.report.quality import quality_rows
from rocket_core.report.speed import SPEED_COLUMNS, speed_rows

if TYPE_CHECKING:
    from rocket_core.report.schema import CompressionReport
    from rocket_core.report.speed import SpeedReport


def compression_html(report: "CompressionReport") -> str:
    """Return a compression's size, quality and time, its files, and what was measured of them."""
    summary = [(one.name, one.value, one.detail) for one in headlines(report)]
    files = [("original", bytes_text(report.totals.dense_bytes))]
    files += [(export.kind, bytes_text(export.stored_bytes)) for export in report.exports]
    parts = [
        table_html(f"{report.model}, {report.change_text}", ("", "after", ""), summary),
        table_html("Files", ("export", "size"), files),
    ]
    if report.evaluation is not None:
        columns = ("", "original", report.evaluation.export)
        parts.append(table_html("Quality", columns, quality_rows(report.evaluation)))
    if report.speed is not None:
        parts.append(speed_html(report.speed))
    return "".join(parts)


def speed_html(report: "SpeedReport") -> str:
    """Return a measurement of speed as a table."""
    return table_html(f"Speed: {report.conditions}", SPEED_COLUMNS, speed_rows(report))


def table_html(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; all text is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
