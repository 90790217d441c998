"""Reference pages that are made from the code when the site is built, so that they cannot fall behind it.

A page names what it wants by a line `<!-- generated: NAME -->`. That line is replaced by Markdown before the page is
parsed; headings, links and anchors in it are checked as those of any other page.

- `commands`: the command line, from `typer utils docs`. sphinx-click does not know the applications of typer, which
  has a click of its own.
- `endpoints`, `schemas`: HTTP, from the OpenAPI document of the application. The extensions that there are either read
  OpenAPI 3.0 alone, or load their scripts from elsewhere in the reader's browser.
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
"""What each name stands for."""

_MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", flags=re.MULTILINE)


def filled_in(source: str) -> str:
    """A page's source with what is generated in the places of its marks.

    Args:
        source: Markdown.

    Raises:
        KeyError: a mark names nothing that is generated.
    """
    return _MARK.sub(lambda mark: GENERATED[mark[1]](), source)


def setup(app: Any) -> dict[str, bool]:
    """Has Sphinx fill in the marks; such pages are read at every build, as the code may have changed."""

    def on_source_read(_app: Any, _page: str, content: list[str]) -> None:
        content[0] = filled_in(content[0])

    def on_outdated(_app: Any, env: Any, *_changes: set[str]) -> list[str]:
        return [page for page in env.found_docs if _MARK.search(env.doc2path(page).read_text(encoding="utf-8"))]

    app.connect("source-read", on_source_read)
    app.connect("env-get-outdated", on_outdated)
    return {"parallel_read_safe": True}
