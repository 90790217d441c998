import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from rocket_cli.option_groups import Without, expand_groups

RUNNER = CliRunner()


@dataclass(frozen=True, kw_only=True)
class Base:
    colour: Annotated[str | None, typer.Option(help="Of the paint.")] = None
    coats: Annotated[int, typer.Option(min=1)] = 2


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    colour: Annotated[str | None, typer.Option(help="Of the varnish.")] = "clear"
    gloss: bool = False


def run(command, *arguments: str):
    app = typer.Typer()
    app.command()(command)
    return RUNNER.invoke(app, arguments)


def test_fields_of_a_group_become_options_of_the_command():
    received: list[object] = []

    @expand_groups
    def paint(*, wall: str, options: Derived, quiet: bool = False) -> None:
        """Paint WALL."""
        received.append((wall, options, quiet))

    assert list(inspect.signature(paint).parameters) == ["wall", "colour", "coats", "gloss", "quiet"]
    assert run(paint, "north", "--coats", "3", "--gloss", "--quiet").exit_code == 0
    assert received == [("north", Derived(coats=3, gloss=True), True)]
    assert "Of the varnish" in run(paint, "--help").output


def test_restrictions_of_a_field_apply():
    @expand_groups
    def paint(*, options: Base) -> None:
        raise AssertionError(options)

    assert run(paint, "--coats", "0").exit_code == 2


def test_omitted_fields_keep_their_defaults_and_are_no_options():
    received: list[Base] = []

    @expand_groups
    def paint(*, options: Annotated[Base, Without("coats")]) -> None:
        received.append(options)

    assert run(paint, "--colour", "red").exit_code == 0
    assert received == [Base(colour="red")]
    assert run(paint, "--coats", "3").exit_code == 2


def test_omitting_an_unknown_field_is_an_error():
    def paint(*, options: Annotated[Base, Without("coat")]) -> None:
        raise AssertionError(options)

    with pytest.raises(ValueError, match="Base has no fields coat"):
        expand_groups(paint)
