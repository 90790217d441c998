"""Settings, errors and exit codes as Markdown tables."""

import inspect
from collections.abc import Iterable, Sequence
from typing import TypeVar

from app.api.problems import status_of
from app.shared import errors as app_errors
from app.shared.settings import describe
from rocket_cli.exit_codes import MEANINGS, exit_code_of_code
from rocket_core import errors as core_errors

Kind = TypeVar("Kind", bound=Exception)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with bars and line breaks in cells escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def settings() -> str:
    """Return a table of all environment variables of the service."""
    rows = [(f"`{row.variable}`", f"`{row.default}`" if row.default else "", row.meaning) for row in describe()]
    return table(("variable", "default", "meaning"), rows)


def exit_codes() -> str:
    """Return a table of the commands' exit codes."""
    return table(("exit code", "meaning"), [(str(int(code)), meaning) for code, meaning in MEANINGS.items()])


def errors() -> str:
    """Return tables of all errors by their codes, those of the library first."""
    library = [(kind, int(kind.exit_code)) for kind in _kinds(core_errors, core_errors.RocketError)]
    service = [
        (kind, int(exit_code_of_code(kind.code, status=status_of(kind))))
        for kind in _kinds(app_errors, app_errors.AppError)
    ]
    return "\n".join(
        [
            "## Of the library\n",
            _errors(library),
            "## Of the service\n",
            _errors(service),
        ]
    )


def _errors(kinds: Iterable[tuple[type[core_errors.RocketError] | type[app_errors.AppError], int]]) -> str:
    rows = [
        (
            f"`{kind.code}`",
            inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
            str(status_of(kind).value),
            str(exit_code),
            "yes" if kind.retryable else "",
        )
        for kind, exit_code in kinds
    ]
    return table(("code", "meaning", "HTTP status", "exit code", "may pass by itself"), rows)


def _kinds(module: object, base: type[Kind]) -> list[type[Kind]]:
    return [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
