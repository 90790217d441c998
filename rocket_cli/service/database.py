"""Database access for `rocket admin`: transactions whose errors end the command, and rows as tables."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.exit_codes import Failure, exit_code_of_code, report_failure, reported_failures
from rocket_cli.progress_view import print_line
from rocket_cli.report_table import text_table, wide_console

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from app.shared.settings import Settings

Row = dict[str, str | int | None]


@dataclass(frozen=True, kw_only=True)
class ServiceDatabase:
    """Where the database of the service is, and whether a command writes results and errors as JSON."""

    data_dir: Annotated[
        Path | None,
        options.option(
            "DIR",
            "Data folder of the service, if `rocket serve` runs with --data-dir.",
            "ROCKET_DATA_DIR or ./rocket-data",
        ),
    ] = None
    as_json: options.JsonResult = False

    @contextmanager
    def transaction(self) -> Iterator["Session"]:
        """Open a writing transaction, whose errors end the command."""
        from app.shared.database import Database
        from app.shared.errors import AppError, InvalidSettingsError
        from app.shared.settings import load_settings

        with reported_failures(as_json=self.as_json):
            try:
                settings = load_settings(**({} if self.data_dir is None else {"data_dir": self.data_dir}))
                _check_file(settings)
                with closing(Database(settings.database)) as database:
                    if not database.is_current():
                        raise InvalidSettingsError(
                            "the database has the schema of another version of Rocket; run `rocket migrate`"
                        )
                    with database.transaction() as session:
                        yield session
            except AppError as error:
                # The same error over HTTP has the same exit code.
                from app.api.problems import status_of

                exit_code = exit_code_of_code(error.code, status=status_of(type(error)))
                failure = Failure(code=error.code, message=str(error), exit_code=exit_code)
                report_failure(failure, as_json=self.as_json)
                raise typer.Exit(failure.exit_code) from error

    def print_rows(self, rows: list[Row]) -> None:
        """Print rows as a table, or as JSON."""
        if self.as_json:
            typer.echo(json.dumps({"data": rows}, indent=2))
        elif not rows:
            print_line("none")
        else:
            columns = [name.removesuffix("_at").replace("_", " ") for name in rows[0]]
            cells = (["-" if cell in {None, ""} else str(cell) for cell in row.values()] for row in rows)
            wide_console().print(text_table(columns, cells))

    def print_outcome(self, row: Row, *lines: str) -> None:
        """Print what a command has changed: a row as JSON, or else lines."""
        if self.as_json:
            typer.echo(json.dumps(row, indent=2))
        else:
            for line in lines:
                print_line(line)


def fields_of(record: object, *names: str) -> Row:
    """Return fields of a record of the database; instants are text."""
    values = {name: getattr(record, name) for name in names}
    return {
        name: value.isoformat(timespec="seconds") if isinstance(value, datetime) else value
        for name, value in values.items()
    }


def _check_file(settings: "Settings") -> None:
    from app.shared.errors import InvalidSettingsError

    # SQLite would create a new database, whose keys the service does not know.
    file = settings.database.database
    if settings.database.get_backend_name() == "sqlite" and file is not None and not Path(file).exists():
        raise InvalidSettingsError(
            f"there is no database at {file}; start `rocket serve` or run `rocket migrate` once, or name the service's "
            "data folder with --data-dir or ROCKET_DATA_DIR"
        )
