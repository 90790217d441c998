"""A report as a single HTML file with its plots, scripts and styles embedded. Loads no torch.

`static` holds the scripts and styles of the figures, `templates` the parts that the service's pages share with the
report.
"""

import base64
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rocket_core.config import stage_label
from rocket_core.report.answers import pieces_after, pieces_before
from rocket_core.report.cost_table import cost_comparison
from rocket_core.report.figure import ColumnKind, Figure, Value
from rocket_core.report.figures import loss_curve, report_figures
from rocket_core.report.formatting import bytes_text, duration_text, kwh_text, percent_text
from rocket_core.report.headlines import headlines
from rocket_core.report.quality import quality_rows
from rocket_core.report.run_commands import run_commands
from rocket_core.report.schema import CompressionReport
from rocket_core.report.speed import SPEED_COLUMNS, speed_rows

STATIC = resources.files(__package__) / "static"
"""Scripts and styles of the figures."""

_SCRIPTS = ("d3.min.js", "plot.min.js", "figures.js")
_STYLES = ("rocket.css",)

_FORMATS: Mapping[ColumnKind, Callable[[Any], str]] = {
    "text": str,
    "count": "{:,}".format,
    "fraction": percent_text,
    "number": "{:.4g}".format,
    "seconds": duration_text,
    "energy": kwh_text,
    "bytes": bytes_text,
}


def environment(*loaders: BaseLoader) -> Environment:
    """Return a template environment that escapes everything; the caller's templates override those of this package.

    Args:
        loaders: loaders of the caller's templates.
    """
    made = Environment(
        loader=ChoiceLoader([*loaders, PackageLoader(__package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "bytes": bytes_text,
        "percent": percent_text,
        "duration": duration_text,
        "cell": cell_text,
        "stage_label": stage_label,
    }
    made.globals |= {"headlines": headlines, "run_commands": run_commands, "quality_rows": quality_rows}
    made.globals |= {"pieces_before": pieces_before, "pieces_after": pieces_after}
    made.globals |= {"SPEED_COLUMNS": SPEED_COLUMNS, "speed_rows": speed_rows}
    return made


def render_report(report: CompressionReport) -> str:
    """Return a report as one self-contained HTML file.

    Args:
        report: report of a finished compression.
    """
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            figures=report_figures(report),
            curve=None if report.healing is None else loss_curve(report.healing.curve),
            cost=cost_comparison(report),
            settings=report.settings.model_dump(mode="json", exclude={"calibration", "evaluate", "accept"}),
            data_links=_data_links,
            scripts=[Markup(_inline(name)) for name in _SCRIPTS],  # noqa: S704 - our own files
            styles=[Markup(_inline(name)) for name in _STYLES],  # noqa: S704 - as above
        )
    )


def cell_text(value: Value, kind: ColumnKind) -> str:
    """Return a value of a figure as human-readable text."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else _FORMATS[kind](value)


def _data_links(figure: Figure) -> dict[str, str]:
    """Return data URLs that contain the data of a figure."""
    texts = {"JSON": ("application/json", figure.model_dump_json()), "CSV": ("text/csv", figure.csv())}
    return {
        name: f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
        for name, (kind, text) in texts.items()
    }


def _inline(name: str) -> str:
    text = (STATIC / name).read_text(encoding="utf-8")
    # These would end the surrounding element.
    assert not any(end in text for end in ("</script", "</style", "<!--")), name
    return text
