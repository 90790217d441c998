import io
from itertools import pairwise

import pytest
from rich.console import Console

from rocket_cli.plots import error_curve
from rocket_client.models import Size

BRAILLE = {chr(code) for code in range(0x2801, 0x2900)}


def sizes(errors):
    return [
        Size(ratio=step / 100, kept_parameters=1, stored_bytes=1, model_bytes=1, error=error)
        for step, error in enumerate(errors)
    ]


CUBIC = sizes((step / 100) ** 3 for step in range(73))


class Stream(io.StringIO):
    encoding = "utf-8"


def terminal(width=80, height=30, **options):
    options = {"force_terminal": True, "color_system": "standard", "legacy_windows": False, "_environ": {}} | options
    return Console(file=options.pop("file", Stream()), width=width, height=height, **options)


def drawn(points, console):
    console.print(error_curve(points, console))
    return console.file.getvalue()


def test_the_curve_rises_from_left_to_right():
    console = terminal(no_color=True)
    lines = drawn(CUBIC, console).splitlines()

    curve = [line for line in lines if BRAILLE & set(line)]
    columns = [min(place for place, sign in enumerate(line) if sign in BRAILLE) for line in curve]
    assert columns == sorted(columns, reverse=True)
    assert columns[-1] < 15
    assert lines[0].split()[0] == "(error)"
    assert lines[-1].split()[1:] == ["0%", "15%", "30%", "45%", "60%", "75%"]
    assert "0.37" in lines[1]


def test_the_axis_of_errors_is_logarithmic():
    lines = drawn(sizes(10.0 ** (step / 10 - 7) for step in range(71)), terminal(no_color=True)).splitlines()

    curve = [line for line in lines if BRAILLE & set(line)]
    columns = [min(place for place, sign in enumerate(line) if sign in BRAILLE) for line in curve]
    # A power of the ratio is a straight line there.
    steps = [one - other for one, other in pairwise(columns)]
    assert max(steps) - min(steps) <= 2
    assert "1e-07" in curve[-1]


@pytest.mark.parametrize("width", [47, 60, 80, 300])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(map(len, drawn(CUBIC, terminal(width, no_color=True)).splitlines())) <= width


@pytest.mark.parametrize("height", [3, 24, 200])
def test_the_curve_leaves_room_on_the_screen(height):
    assert 8 <= len(drawn(CUBIC, terminal(height=height)).splitlines()) <= 20


def test_colours_depend_on_the_terminal():
    assert "\x1b[" in drawn(CUBIC, terminal())
    assert "\x1b[" not in drawn(CUBIC, terminal(no_color=True))
    assert "\x1b[" not in drawn(CUBIC, terminal(color_system=None))


@pytest.mark.parametrize(
    "console",
    [
        terminal(46),
        terminal(force_terminal=False),
        terminal(_environ={"TERM": "dumb"}),
        terminal(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii")),
    ],
    ids=["narrow", "no terminal", "dumb", "without its characters"],
)
def test_an_incapable_terminal_shows_no_curve(console):
    assert error_curve(CUBIC, console) is None


@pytest.mark.parametrize("points", [[], sizes([0.5]), sizes([0, 0])], ids=["nothing", "one point", "no error"])
def test_a_degenerate_curve_is_not_drawn(points):
    assert error_curve(points, terminal()) is None
