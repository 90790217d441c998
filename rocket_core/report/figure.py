"""A figure as data: a table with a title. Loads no torch.

The same rows are plotted, shown as a table, and offered as JSON and CSV, so that a figure shows nothing that its data
do not contain.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from pydantic import Field

from rocket_core.schema import FrozenModel

ColumnKind = Literal["text", "count", "fraction", "number", "seconds", "bytes", "energy"]
Value: TypeAlias = str | int | float | None
Row: TypeAlias = dict[str, Value]
Item = TypeVar("Item")

# Spreadsheets treat values with these prefixes as formulas.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Column(FrozenModel):
    """A column of a figure's data."""

    name: str
    """key in the rows."""
    title: str
    """meaning of the values, with their unit."""
    kind: ColumnKind = "number"
    """how a value is formatted."""


class Figure(FrozenModel):
    """A figure as data."""

    name: str
    """identifier of the figure, by which a page draws it."""
    title: str
    """what it shows."""
    note: str
    """how to read it."""
    columns: tuple[Column, ...]
    """columns of the rows."""
    rows: tuple[dict[str, Value], ...]
    """one row for each item that is drawn."""
    options: dict[str, Value] = Field(default_factory=dict)
    """data for the drawing in addition to the rows, such as a marked value."""
    measures: tuple[str, ...] = ()
    """names of columns that the marks can be coloured by, the usual one first."""

    def csv(self) -> str:
        """Return the rows as CSV (RFC 4180), with a header line."""
        stream = io.StringIO(newline="")
        names = [column.name for column in self.columns]
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows([_cell(row.get(name)) for name in names] for row in self.rows)
        return stream.getvalue()


@dataclass(frozen=True, slots=True)
class Cells(Generic[Item]):
    """A column, and the value that it has for an item.

    Attributes:
        title: title of the column; empty for a value that only the drawing needs, without a column.
        value: returns the value for an item.
        kind: how a value is formatted.
    """

    title: str
    value: Callable[[Item], Value]
    kind: ColumnKind = "number"


def columns_of(table: Mapping[str, Cells[Item]]) -> tuple[Column, ...]:
    """Return the columns of a table of cells by name."""
    return tuple(Column(name=name, title=cells.title, kind=cells.kind) for name, cells in table.items() if cells.title)


def rows_of(table: Mapping[str, Cells[Item]], items: Iterable[Item]) -> tuple[Row, ...]:
    """Return a row of the table for each item."""
    return tuple({name: cells.value(item) for name, cells in table.items()} for item in items)


def known_names(names: Iterable[str], rows: Iterable[Row]) -> tuple[str, ...]:
    """Return those of the names that have a value in some row."""
    rows = tuple(rows)
    return tuple(name for name in names if any(row[name] is not None for row in rows))


def _cell(value: Value) -> Value:
    # Names come from untrusted models.
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
