"""Pictures of the README, taken of jobs of the real service.

    python docs/draw_screens.py MODEL --calibrate FILE --measure FILE

It starts `rocket serve` with a copy of the model, compresses it to each size, and photographs the report of the first
job and the model's page with Chromium. SmolLM2-135M takes a quarter of an hour on two cores.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

from rocket_client import Rocket

FOLDER = Path(__file__).parent / "figures"
_SERVE = "from rocket_cli.main import main; main()"
_WIDTH = 1100
_CALIBRATION, _EVALUATION = {"samples": 64, "sequence_length": 256}, {"samples": 24, "sequence_length": 512}


def main() -> None:
    """Run the jobs and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a decoder")
    parser.add_argument("--calibrate", type=Path, required=True, help="a .txt or .jsonl file")
    parser.add_argument("--measure", type=Path, required=True, help="another one")
    parser.add_argument("--name", help="name of the model in the pictures; that of its folder by default")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[80, 60, 100, 130], help="sizes to compress to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rocket-screens-") as folder:
        data, name = Path(folder), given.name or given.model.resolve().name
        shutil.copytree(given.model, data / "models" / name)
        (data / "datasets").mkdir()
        texts = (given.calibrate, given.measure)
        for text in texts:
            shutil.copyfile(text, data / "datasets" / text.name)
        with serving(data) as server:
            first = compressed(server, f"local/{name}", [f"local/{text.name}" for text in texts], given.megabytes)
            take(server, "report.png", f"/jobs/{first}/report", height=1130)
            take(server, "frontier.png", f"/ui/model?id=local/{name}", height=760)


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """Yield the address of a service with a data folder while the context is active."""
    command = [sys.executable, "-c", _SERVE, "serve", "--port", "0", "--data-dir", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - this very interpreter
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("Serving on ").strip()
        finally:
            process.terminate()


def compressed(server: str, model: str, texts: Sequence[str], megabytes: Sequence[float]) -> str:
    """Compress a model to some sizes, one after another, and return the id of the first job."""
    calibrate, measure = texts
    ids = []
    with Rocket(server) as rocket:
        for size in megabytes:
            job = rocket.submit(
                model,
                target_bytes=round(size * 1e6),
                calibration={"dataset": calibrate, **_CALIBRATION},
                evaluate={"dataset": measure, **_EVALUATION},
            )
            found = rocket.wait(job.id)
            assert found.status == "succeeded", found.error
            ids.append(job.id)
            sys.stderr.write(f"{model}, {size:g} MB: {job.id}\n")
    return ids[0]


def take(server: str, name: str, address: str, *, height: int) -> None:
    """Photograph the top of a page."""
    program = shutil.which("chromium")
    assert program, "this program needs Chromium: apt-get install chromium"
    # Its sandbox refuses to work for root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        view = ViewportSize(width=_WIDTH, height=height)
        page = browser.new_context(base_url=server, viewport=view, color_scheme="light").new_page()
        page.goto(address)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=FOLDER / name)
        browser.close()


if __name__ == "__main__":
    main()
