"""Compression of a small model with the real service: `make demo`, or `python examples/demo.py`.

The demo starts the embedded service, submits the bundled model over HTTP, downloads the result, loads it with
transformers and compares it with the original. The last line of output is the download folder.
"""

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.table import Table

from app.shared.errors import AppError
from app.shared.settings import load_settings
from rocket_cli.commands.download import bytes_view
from rocket_cli.connection import Connection
from rocket_cli.following import follow_job
from rocket_cli.progress_view import hide_library_bars, progress_view
from rocket_cli.report_table import wide_console
from rocket_client import Rocket
from rocket_client._wire import RetryNotice
from rocket_client.errors import ClientError, DetachedError
from rocket_core.errors import RocketError
from rocket_core.report.formatting import bytes_text, count_text, duration_text, percent_text
from rocket_core.report.schema import CompressionReport, LayerReport
from rocket_core.sizes.budget import remaining_parameters

MODEL = Path(__file__).parent / "tiny-llama"
HELD_OUT = MODEL / "heldout.txt"
DOWNLOADS = Path("rocket-demo")
RATIO = 0.3
# A quarter of the default: enough for a model of this size.
SAMPLES = 64
WINDOW = 256

# A fifth is lost with a thirtieth of the samples.
_MOST_LOST = 1.5
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOG_LINES = 15
_ANNOUNCED = "Serving on "
_SERVE = "from rocket_cli.main import main; main()"


class DemoError(Exception):
    """A step of the demo failed; the message says which and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured model.

    Attributes:
        name: its name in the table.
        parameters: number of its parameters.
        stored_bytes: bytes of its safetensors.
        perplexity: perplexity on the held-out text.
    """

    name: str
    parameters: int
    stored_bytes: int
    perplexity: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running service.

    Attributes:
        address: its address.
        process: the process of `rocket serve`.
        log: its log.
    """

    address: str
    process: subprocess.Popen[str]
    log: Path

    def require_alive(self, waiting: RetryNotice) -> None:
        """Raise an error if the service has ended, as waiting for it would be in vain.

        Raises:
            DemoError: the service has ended.
        """
        if self.process.poll() is not None:
            raise DemoError(f"the service has ended ({waiting.reason})\n{_tail(self.log)}")


def main() -> int:
    """Run the demo and return the exit code."""
    # However the demo ends, it must stop the service that it started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    try:
        folder = run()
    except (KeyboardInterrupt, DetachedError):
        print(
            "demo: interrupted; the service is stopped, and finishes the job when it is started again", file=sys.stderr
        )
        return 130
    except (DemoError, AppError, ClientError, RocketError, OSError) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    print(f"\nAll of it took {duration_text(time.monotonic() - began)}. The files are in")
    sys.stderr.flush()
    print(folder, flush=True)
    return 0


def run() -> Path:
    """Run all steps in order, and return the download folder."""
    settings = load_settings()
    model_id = install_model(settings.models_folder)
    with (
        service(settings.data_dir / "demo.log") as server,
        Rocket(server.address, on_retry=server.require_alive) as rocket,
    ):
        say(f"the service runs at {server.address}, with its data in {settings.data_dir}")
        job_id = compress(rocket, model_id)
        folder = download(rocket, job_id)
        report = rocket.report(job_id)
    say("the service is stopped; now the models, with transformers")
    models = [
        measure("original", MODEL, report.totals.model_parameters),
        measure("compressed", folder / "rocket", _parameters_left(report)),
    ]
    print_tables(models, report)
    require_success(models, report)
    return folder


def install_model(models_folder: Path) -> str:
    """Copy the bundled model to the service's models folder unless it is there, and return its id."""
    target = models_folder / MODEL.name
    if not target.exists():
        models_folder.mkdir(parents=True, exist_ok=True)
        # An incomplete copy must never be offered, even after an interruption; names that start with a dot are not.
        with tempfile.TemporaryDirectory(prefix=".", dir=models_folder) as made:
            shutil.copytree(MODEL, Path(made) / MODEL.name)
            (Path(made) / MODEL.name).rename(target)
        say(f"{MODEL.name} is copied to {target}")
    return f"local/{target.name}"


@contextmanager
def service(log: Path) -> Iterator[Server]:
    """Run `rocket serve` on a free port in the context."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        # A new session: Ctrl-C reaches only the demo, which then stops the service in order.
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-c", _SERVE, "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    try:
        yield Server(address=_address(process, log), process=process, log=log)
    finally:
        _stop(process)


def compress(rocket: Rocket, model_id: str) -> str:
    """Submit the model, show the job until it has succeeded, and return its id."""
    job = rocket.submit(model_id, ratio=RATIO, calibration={"samples": SAMPLES, "sequence_length": WINDOW})
    say(f"{job.id}: {model_id} at ratio {RATIO}, calibrated on {SAMPLES} windows of {WINDOW} tokens")
    job = follow_job(rocket, job, Connection(server=rocket.server))
    if job.status != "succeeded":
        reason = job.error.message if job.error else f"it is {job.status}"
        raise DemoError(f"the job did not succeed: {reason}")
    return job.id


def download(rocket: Rocket, job_id: str) -> Path:
    """Download a job's artifacts into a new folder below the current one."""
    folder = (DOWNLOADS / job_id).absolute()
    with progress_view(quiet=False) as view:
        notice = Connection(server=rocket.server).notice
        files = rocket.download(job_id, folder, on_progress=bytes_view(view, notice))
    say(f"{len(files)} files downloaded, each verified by its SHA-256")
    return folder


def measure(name: str, folder: Path, parameters: int) -> Measured:
    """Load a model with transformers and measure its perplexity on the held-out text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import rocket_core.hf  # noqa: F401 - teaches transformers the compressed layers
    from rocket_core.calibration.datasets import file_documents, token_windows
    from rocket_core.evaluation import perplexity

    hide_library_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = token_windows(file_documents(HELD_OUT), tokenizer, count=None, length=WINDOW)
    result = perplexity(model, windows, batch_size=4)
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Measured(name=name, parameters=parameters, stored_bytes=stored_bytes, perplexity=result.perplexity)


def print_tables(models: Sequence[Measured], report: CompressionReport) -> None:
    """Print the result for the whole model and for each layer."""
    sizes = Table(box=None, padding=(0, 2), pad_edge=False)
    sizes.add_column("")
    for column in ("parameters", "bytes on disk", "held-out perplexity"):
        sizes.add_column(column, justify="right")
    for model in models:
        size = bytes_text(model.stored_bytes)
        sizes.add_row(model.name, count_text(model.parameters), size, f"{model.perplexity:.2f}")
    console = wide_console()
    console.print("\n", sizes, "\n")
    removed = percent_text(report.totals.achieved_ratio)
    console.print(f"{removed} of the parameters of the blocks are gone. How each layer is stored:\n")
    console.print(layer_table(report.layers))


def layer_table(layers: Sequence[LayerReport]) -> Table:
    """Return a table of how layers are stored, with a row for each block and a column for each kind of layer."""
    cells: dict[str, dict[str, str]] = {}
    for layer in layers:
        block, name = _block_and_name(layer.name)
        form = layer.kind if layer.rank is None else f"rank {layer.rank}"
        zeros = "" if not layer.sparsity else f", {100 * layer.sparsity:.0f} % zeros"
        cells.setdefault(block, {})[name] = form.replace("_", " ") + zeros
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("block")
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for block, row in cells.items():
        table.add_row(block, *(row.get(name, "") for name in names))
    return table


def require_success(models: Sequence[Measured], report: CompressionReport) -> None:
    """Raise an error for figures that cannot be right.

    Raises:
        DemoError: there are such figures.
    """
    original, compressed = models
    if report.totals.achieved_ratio < RATIO:
        raise DemoError(
            f"only {percent_text(report.totals.achieved_ratio)} were removed instead of {percent_text(RATIO)}"
        )
    if compressed.stored_bytes >= original.stored_bytes:
        raise DemoError("the compressed model is no smaller than the original")
    if not compressed.perplexity < _MOST_LOST * original.perplexity:
        raise DemoError(f"a perplexity of {compressed.perplexity:.2f} instead of {original.perplexity:.2f} is too much")


def say(text: str) -> None:
    """Print a message of the demo."""
    print(f"demo: {text}", flush=True)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        line = lines.get(timeout=_START_SECONDS)
    except queue.Empty:
        raise DemoError(f"the service has said nothing for {_START_SECONDS:.0f} seconds\n{_tail(log)}") from None
    if not line.startswith(_ANNOUNCED):
        raise DemoError(
            f"the service did not start\n{_tail(log)}\nif another service uses the data folder, stop it, or set "
            "ROCKET_DATA_DIR to another folder"
        )
    return line.removeprefix(_ANNOUNCED).strip()


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        # Kill the whole session, so that no job outlives the service.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"the last lines of {log}:", *(f"    {line}" for line in lines)])


def _parameters_left(report: CompressionReport) -> int:
    totals = report.totals
    return remaining_parameters(totals.model_parameters, totals.compressible_parameters, totals.kept_parameters)


def _block_and_name(layer: str) -> tuple[str, str]:
    """Return block and name of a layer: `3` and `up_proj` for `model.layers.3.mlp.up_proj`."""
    parts = layer.split(".")
    return next((part for part in parts if part.isdecimal()), ""), parts[-1]


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
