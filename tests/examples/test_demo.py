"""The demo of `make demo`, on less text."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.shared.storage import data_folder_lock
from examples.demo import layer_table
from tests.reference.reports import layer_named

ROOT = Path(__file__).parents[2]

# The same program, which reads less text for calibration and for perplexity.
DRIVER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import examples.demo as demo
demo.SAMPLES, demo.WINDOW = 2, 64
short = sys.argv[1]
open(short, "w").write(demo.HELD_OUT.read_text()[:20000])
demo.HELD_OUT = demo.Path(short)
sys.exit(demo.main())
"""


@contextmanager
def demo(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROCKET_")}
    environment |= {"ROCKET_DATA_DIR": "data", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-c", DRIVER, str(folder / "short.txt")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:
        # Against a demo that hangs, not against a busy machine.
        timer = threading.Timer(300, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def require_free(folder):
    """Assert that nothing that holds the data folder is still running."""
    with data_folder_lock(folder / "data"):
        pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with demo(folder) as process:
        output, _ = process.communicate()
    return folder, process.returncode, output


def test_it_ends_with_the_download_folder(finished):
    folder, code, output = finished
    assert code == 0, output
    downloads = Path(output.splitlines()[-1])
    assert downloads.is_absolute()
    assert downloads.is_relative_to(folder)
    assert {path.name for path in downloads.iterdir()} == {"rocket", "report.json", "report.html"}


def test_layers_are_named_by_how_they_are_stored():
    sparse = layer_named("model.layers.0.up", kind="sparse").model_copy(update={"sparsity": 0.45})
    factored = layer_named("model.layers.0.down").model_copy(update={"sparsity": 0.5})
    table = layer_table([sparse, factored, layer_named("model.layers.0.gate", kind="dense")])
    assert [[*column.cells] for column in table.columns[1:]] == [
        ["sparse, 45 % zeros"],
        ["rank 2, 50 % zeros"],
        ["dense"],
    ]


def test_it_compares_the_models_and_shows_every_layer(finished):
    _, _, output = finished
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    for model in ("original", "compressed"):
        assert float(rows[model][-1]) > 1
    sizes = {model: float(rows[model][2]) for model in ("original", "compressed")}
    assert sizes["compressed"] < sizes["original"]
    assert len(rows["0"]) > 7
    assert {"0", "1", "2", "3", "4", "5"} <= set(rows)


def test_it_keeps_the_model_and_leaves_no_service(finished):
    folder, _, _ = finished
    assert (folder / "data/models/tiny-llama/model.safetensors").is_file()
    require_free(folder)


def test_a_data_folder_in_use_is_reported_with_what_to_do(tmp_path):
    with data_folder_lock(tmp_path / "data"), demo(tmp_path) as process:
        output, _ = process.communicate()
        assert process.returncode == 1
    assert "another service uses" in output
    assert "set ROCKET_DATA_DIR to another folder" in output
    assert "Traceback" not in output


@pytest.mark.soak
def test_an_interrupted_demo_stops_the_service(tmp_path):
    with demo(tmp_path) as process:
        seen = []
        # The first line about the job says that it is queued; a fast worker leaves out "running".
        while not any(line.startswith("rocket:") and "queued" not in line for line in seen):
            seen.append(process.stdout.readline())
            assert seen[-1], "".join(seen)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()

    assert process.returncode == 130, output
    assert "interrupted; the service is stopped" in output
    assert "Traceback" not in output
    require_free(tmp_path)
