"""Data of figures as files, and their addresses."""

import json
from collections.abc import Iterable

from fastapi.responses import Response
from starlette.exceptions import HTTPException

from rocket_core.report.figure import Figure


def figure_links(page: str, query: str = "") -> dict[str, str]:
    """Return the addresses of the data of a page's figures, with `%s` for the figure's name."""
    return {kind: f"{page}/figures/%s.{kind.lower()}{query}" for kind in ("JSON", "CSV")}


def figure_file(name: str, figures: Iterable[Figure | None]) -> Response:
    """Return the data of one of a page's figures as a file.

    Args:
        name: name of the figure, with the suffix of the format.
        figures: the figures of the page, as far as they exist.

    Raises:
        HTTPException: 404, the figure or the format does not exist.
    """
    stem, _, suffix = name.rpartition(".")
    figure = next((figure for figure in figures if figure is not None and figure.name == stem), None)
    if figure is None or suffix not in {"json", "csv"}:
        raise HTTPException(404)
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    if suffix == "csv":
        return Response(figure.csv(), media_type="text/csv", headers=headers)
    return Response(json.dumps(figure.model_dump()), media_type="application/json", headers=headers)
