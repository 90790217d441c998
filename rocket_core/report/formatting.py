"""Human-readable numbers, for the command line, pages and model cards."""

import math

_BYTE_UNITS = ("kB", "MB", "GB", "TB", "PB")
_COUNT_UNITS = (("B", 1e9), ("M", 1e6), ("k", 1e3))
_AGE_UNITS = (("d", 86_400), ("h", 3600), ("m", 60))


def bytes_text(size: int) -> str:
    """Return a size in decimal units: 999 bytes, 5.49 MB."""
    if size < 1000:
        return "1 byte" if size == 1 else f"{size} bytes"
    value = float(size)
    for unit in _BYTE_UNITS:
        value /= 1000
        # A value that is rounded to 1000 takes the next unit.
        if value < 999.995 or unit == _BYTE_UNITS[-1]:
            break
    return f"{value:,.2f} {unit}"


def count_text(count: int) -> str:
    """Return a count with three digits: 999, 12.3k, 1.24M, 7.61B."""
    rounded = float(f"{count:.3g}")
    for unit, size in _COUNT_UNITS:
        if rounded >= size:
            return f"{rounded / size:.3g}{unit}"
    return str(count)


def percent_text(fraction: float | int, sign: str = "-") -> str:
    """Return a fraction as a percentage with one decimal, 30.5%; with `sign="+"` always signed."""
    return f"{100 * fraction:{sign}.1f}%"


def progress_text(fraction: float | int) -> str:
    """Return the progress of a run as a whole percentage, rounded down so that 100% means done."""
    return f"{math.floor(100 * min(max(fraction, 0.0), 1.0))}%"


def duration_text(seconds: float | int) -> str:
    """Return a duration to three digits or to the second: 0.042 s, 7.31 s, 5 min, 12 min 40 s, 3 h 05 min."""
    # What would be rounded to 60 s is a minute.
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (rest, "s"))
    (first, unit), (second, second_unit) = parts
    return f"{first} {unit} {second:02} {second_unit}" if second else f"{first} {unit}"


def clock_text(seconds: float | int) -> str:
    """Return the time left as a clock shows it, with hours if there are any: 0:07, 12:40, 3:05:00."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age_text(seconds: float | int) -> str:
    """Return an age in its largest unit: 3d, 5h, 12m, 40s."""
    for unit, size in _AGE_UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def kwh_text(kwh: float) -> str:
    """Return an energy to three digits: 0.00342 Wh, 76.5 Wh, 7.88 kWh."""
    return f"{1000 * kwh:.3g} Wh" if kwh < 1 else f"{kwh:.3g} kWh"
