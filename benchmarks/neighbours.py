"""`python -m benchmarks.neighbours`: a compression on an idle machine, and on one whose cores are shared.

Busy loops, one per processor, stand for the others. As the cores are shared fairly, work on one thread takes up to
twice its time; what exceeds that is lost to threads that wait for each other. The last line repeats it with threads
that spin.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROCKET = Path(sys.executable).parent / "rocket"
MODEL = "examples/tiny-llama"


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Keep processors busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of(model: str, environment: dict[str, str]) -> float:
    """Return the time of one compression."""
    folder = Path(tempfile.mkdtemp(prefix="rocket-neighbours-"))
    command = [ROCKET, "compress", model, folder / "out", "--ratio", "0.3", "--samples", "64", "--json", "--no-energy"]
    began = time.perf_counter()
    try:
        subprocess.run(command, check=True, capture_output=True, env=environment)  # noqa: S603
    finally:
        shutil.rmtree(folder)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--neighbours", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "GOMP_"))}
    idle = seconds_of(given.model, plain)
    print(f"idle                        {idle:6.1f} s", flush=True)
    with busy_neighbours(given.neighbours):
        for name, more in (("busy", {}), ("busy, spinning threads", {"OMP_WAIT_POLICY": "ACTIVE"})):
            seconds = seconds_of(given.model, plain | more)
            print(f"{name:<27} {seconds:6.1f} s, {seconds / idle:.2f} times", flush=True)


if __name__ == "__main__":
    main()
