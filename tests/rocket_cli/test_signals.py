"""Signals to the real console script in a separate process, with a pipeline that only waits."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rocket_cli.signals import stopping_on_signals

# The fake takes a step every 20 ms, or a single one that does not end; it can be cancelled between steps.
DRIVER = """
import sys, time
from types import ModuleType, SimpleNamespace
from rocket_core.errors import CompressionCancelledError

def compress(model, output, config, *, observer, **_others):
    (output / ".rocket-work").mkdir(parents=True, exist_ok=True)
    for step in range(3000):
        layer, fraction = f"layer.{step}", step / 3000
        observer.on_progress(SimpleNamespace(stage="calibrating", layer=layer, fraction=fraction, seconds_left=9.0))
        (output / "started").touch()
        if observer.should_cancel():
            raise CompressionCancelledError("cancelled while calibrating; finished layers are kept")
        time.sleep(60 if model == "stuck" else 0.02)

pipeline = ModuleType("rocket_core.pipeline")
pipeline.compress = compress
pipeline.Observer = pipeline.Progress = pipeline.ProfileCache = object
sys.modules["rocket_core.pipeline"] = pipeline
import rocket_cli.local_run
rocket_cli.local_run.hide_library_bars = lambda: None
from rocket_cli.main import main
main()
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def running(output: Path, model: str = "slow", *options: str, stderr: int = subprocess.PIPE) -> Iterator:
    command = [sys.executable, "-c", DRIVER, "compress", model, str(output), "--ratio", "0.3", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        wait_for((output / "started").exists)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_between_layers_and_shows_resume(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "my output"
    with running(output) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=180)

    assert process.returncode == 130
    assert out == ""
    assert "stopping after this layer or step" in err
    assert "cancelled while calibrating; finished layers are kept" in err
    assert "Traceback" not in err
    resume = shlex.split(err.splitlines()[-1])
    assert resume == ["rocket", "compress", "--resume", "slow", str(output), "--ratio", "0.3"]


def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "out", "stuck") as process:
        process.send_signal(signal.SIGINT)
        # The first one must have been handled, or the two would arrive as one.
        line = ""
        while "stopping" not in line:
            line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=180)

    assert process.returncode == 130
    assert "finished layers are kept in" in err
    assert "rocket compress --resume stuck" in err
    assert "Traceback" not in err


def test_an_interrupted_run_is_json_for_programs(tmp_path: Path) -> None:
    with running(tmp_path / "out", "slow", "--json") as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=180)

    assert process.returncode == 130
    assert json.loads(out)["error"]["code"] == "cancelled"
    assert "--json" in err.splitlines()[-1], "the run is resumed as it was begun"


def test_a_terminal_shows_a_bar_and_the_notice(tmp_path: Path) -> None:
    terminal, end_of_process = pty.openpty()
    drawn = b""
    with running(tmp_path / "out", stderr=end_of_process) as process:
        os.close(end_of_process)
        while b"layer." not in drawn:
            drawn += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        try:
            while chunk := os.read(terminal, 4096):
                drawn += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        process.wait(timeout=180)
    os.close(terminal)

    assert process.returncode == 130
    assert b"profiling" in drawn
    assert b"0:09 left" in drawn
    assert b"rocket compress --resume slow" in drawn


def test_handlers_are_restored() -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))

    with stopping_on_signals(lambda: None) as stop:
        assert not stop.made()
        assert signal.getsignal(signal.SIGINT) != before[0]

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_stop_request_is_announced_once() -> None:
    announced = []
    with stopping_on_signals(lambda: announced.append(1)) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.made()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert announced == [1]


def test_every_signal_after_the_first_aborts() -> None:
    called: list[str] = []
    with stopping_on_signals(lambda: called.append("stop"), lambda: called.append("abort")):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)

    assert called == ["stop", "abort", "abort"]
