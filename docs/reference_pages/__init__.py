"""Sphinx extension that generates reference pages from the code, so that they are always current.

In a page, a line `<!-- generated: NAME -->` is replaced by Markdown before the page is parsed; its headings, links and
anchors are checked like those of any other page.

- `commands`: the command line, from `typer utils docs`. sphinx-click does not support typer's applications, as typer
  has its own copy of click.
- `endpoints`, `schemas`: HTTP, from the OpenAPI document of the application. Existing extensions either support only
  OpenAPI 3.0, or load scripts from other hosts in the reader's browser.
- `settings`, `errors`, `exit-codes`: tables.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from reference_pages import commands, openapi, tables

GENERATED: Mapping[str, Callable[[], str]] = {
    "commands": commands.command_line,
    "endpoints": lambda: openapi.endpoints(openapi.document()),
    "schemas": lambda: openapi.schemas(openapi.document()),
    "settings": tables.settings,
    "errors": tables.errors,
    "exit-codes": tables.exit_codes,
}
"""Generators by name."""

_MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", flags=re.MULTILINE)


def filled_in(source: str) -> str:
    """Return a page's source with its marks replaced by generated text.

    Args:
        source: Markdown.

    Raises:
        KeyError: a mark has an unknown name.
    """
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), source)


def setup(app: Any) -> dict[str, bool]:
    """Make Sphinx replace the marks, and read pages with marks at every build, as the code may have changed."""

    def on_source_read(_app: Any, _page: str, content: list[str]) -> None:
        content[0] = filled_in(content[0])

    def on_outdated(_app: Any, env: Any, *_changes: set[str]) -> list[str]:
        return [page for page in env.found_docs if _MARK.search(env.doc2path(page).read_text(encoding="utf-8"))]

    app.connect("source-read", on_source_read)
    app.connect("env-get-outdated", on_outdated)
    return {"parallel_read_safe": True}
