"""Human-readable numbers."""

from typing import Any

from rich.filesize import decimal

from rocket_core.report.figures import ColumnKind, Value
from rocket_core.report.schema import kwh_text

_NOTHING = "-"


def cell_text(value: Value, kind: ColumnKind) -> str:
    """Return a value of a figure as human-readable text."""
    if value is None:
        return _NOTHING
    if isinstance(value, str):
        return value
    writers: dict[ColumnKind, Any] = {
        "text": str,
        "count": lambda number: f"{number:,}",
        "fraction": percent_text,
        "number": lambda number: f"{number:.4g}",
        "seconds": duration_text,
        "energy": kwh_text,
        "bytes": bytes_text,
    }
    return str(writers[kind](value))


def bytes_text(size: int) -> str:
    """Return a size in decimal units: 5.49 MB."""
    return decimal(size, precision=2)


def percent_text(fraction: float | int) -> str:
    """Return a fraction in per cent, to one digit."""
    return f"{100 * fraction:.1f} %"


def duration_text(seconds: float | int) -> str:
    """Return a duration to three digits or to the second: 0.042 s, 7.31 s, 12 min 40 s, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
