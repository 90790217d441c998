import io

import pytest
from rich.console import Console

from rocket_cli.progress_view import STOPPING, BarView, LineView, ProgressView, progress_view


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_there_is_a_line_for_each_stage_and_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    view = LineView(clock)
    for second in range(25):
        clock.now = float(second)
        view.show("calibrating" if second < 23 else "allocating", f"layer{second}", second / 100, None)

    assert capsys.readouterr().err.splitlines() == [
        "rocket: 0%: profiling the layers, layer0",
        "rocket: 10%: profiling the layers, layer10",
        "rocket: 20%: profiling the layers, layer20",
        "rocket: 23%: choosing what to keep, layer23",
    ]


def test_bar_shows_stage_layer_percentage_and_time_left() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None, legacy_windows=False)

    with BarView(console) as view:
        view.show("calibrating", "model.layers.3.mlp.down_proj", 0.427, 754.2)
        view.refresh()
    drawn = stream.getvalue()

    assert "profiling" in drawn
    assert "model.layers.3.mlp.down_proj" in drawn
    assert "42%" in drawn
    assert "12:35 left" in drawn


def test_the_bar_announces_that_the_run_will_stop() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None, legacy_windows=False)

    with BarView(console) as view:
        view.refresh()
        assert STOPPING not in stream.getvalue()
        view.announce_stop()
        view.refresh()

    assert STOPPING in stream.getvalue()


def test_a_long_layer_name_does_not_break_the_line() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None, legacy_windows=False)

    with BarView(console) as view:
        view.show("factorizing", "model.layers.3." + "x" * 200, 0.5, None)
        view.refresh()

    last_frame = stream.getvalue().split("compressing the layers")[-1]
    assert "…" in last_frame
    assert "50%" in last_frame


@pytest.mark.parametrize(("quiet", "kind"), [(True, ProgressView), (False, LineView)])
def test_without_a_terminal_there_is_no_bar(quiet: bool, kind: type) -> None:
    with progress_view(quiet=quiet) as view:
        assert isinstance(view, kind)
