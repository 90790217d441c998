"""The bar that people see who call the library."""

import io
import re
import sys
from types import ModuleType

import pytest

from rocket_core.pipeline import Observer, Progress, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


class ZMQInteractiveShell:
    """Named like the shell of a notebook."""


def step(fraction, layer="q_proj", stage="calibrating"):
    return Progress(stage=stage, layer=layer, fraction=fraction, seconds_left=None)


@pytest.fixture
def no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)


def show(*steps):
    with progress_bar.shown(None) as observer:
        for one in steps:
            observer.on_progress(one)


def test_a_terminal_shows_stage_layer_and_share(monkeypatch, no_notebook):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar.shown(None) as observer:
        observer.on_progress(step(0.1))
        observer.on_progress(step(0.7, "down_proj", "factorizing"))
        observer.on_progress(step(0.7, None, "factorizing"))
    first, second = terminal.getvalue().split("compressing the layers")[:2]
    assert re.search(r"profiling the layers: +10%.*q_proj", first)
    assert re.match(r": +70%.*down_proj", second)
    drawn = terminal.getvalue()
    assert drawn.endswith("\r"), "the bar disappears"


def test_nothing_is_shown_where_nobody_looks_on(monkeypatch, no_notebook):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    show(step(0.5), step(1.0))
    assert log.getvalue() == ""


def test_an_observer_of_the_caller_replaces_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    given = Observer()
    with progress_bar.shown(given) as observer:
        observer.on_progress(step(0.5))
    assert (observer, terminal.getvalue()) == (given, "")


@pytest.mark.parametrize(("shell", "watched"), [(ZMQInteractiveShell(), True), (object(), False), (None, False)])
def test_a_notebook_is_recognised_by_its_shell(monkeypatch, shell, watched):
    module = ModuleType("IPython")
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress_bar.is_watched() is watched
