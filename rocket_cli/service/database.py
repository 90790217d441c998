"""Database access for `rocket admin`: transactions whose errors end the command, and rows as tables."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from rocket_cli.exit_codes import Failure, exit_code_of_code, report_failure, reported_failures
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import wide_console

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from app.shared.settings import Settings

Row = dict[str, str | int | None]

DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Data folder of the service, if `rocket serve` runs with --data-dir.",
        show_default="ROCKET_DATA_DIR or ./rocket-data",
    ),
]


@contextmanager
def transaction(data_dir: Path | None, *, as_json: bool) -> Iterator["Session"]:
    """Open a writing transaction on the service's database, whose errors end the command."""
    from app.shared.database import Database
    from app.shared.errors import AppError
    from app.shared.settings import load_settings

    with reported_failures(as_json=as_json):
        try:
            settings = load_settings(**({} if data_dir is None else {"data_dir": data_dir}))
            _check_file(settings)
            with closing(Database(settings.database)) as database:
                _check_schema(database.is_current())
                with database.transaction() as session:
                    yield session
        except AppError as error:
            # The same error over HTTP has the same exit code.
            from app.api.problems import status_of

            exit_code = exit_code_of_code(error.code, status=status_of(type(error)))
            failure = Failure(code=error.code, message=str(error), exit_code=exit_code)
            report_failure(failure, as_json=as_json)
            raise typer.Exit(failure.exit_code) from error


def _check_file(settings: "Settings") -> None:
    from app.shared.errors import InvalidSettingsError

    # SQLite would create a new database, whose keys the service does not know.
    file = settings.database.database
    if settings.database.get_backend_name() == "sqlite" and file is not None and not Path(file).exists():
        raise InvalidSettingsError(
            f"there is no database at {file}; start `rocket serve` or run `rocket migrate` once, or name the service's "
            "data folder with --data-dir or ROCKET_DATA_DIR"
        )


def _check_schema(is_current: bool) -> None:
    from app.shared.errors import InvalidSettingsError

    if not is_current:
        raise InvalidSettingsError("the database has the schema of another version of Rocket; run `rocket migrate`")


def text_of(instant: datetime | None) -> str | None:
    """Return an instant as text."""
    return None if instant is None else instant.isoformat(timespec="seconds")


def print_rows(rows: list[Row], *, as_json: bool) -> None:
    """Print rows as a table, or as JSON."""
    if as_json:
        typer.echo(json.dumps({"data": rows}, indent=2))
        return
    if not rows:
        print_line("none")
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for column in rows[0]:
        table.add_column(column.removesuffix("_at").replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*(Text("-" if cell in {None, ""} else str(cell)) for cell in row.values()))
    wide_console().print(table)
