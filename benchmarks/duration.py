"""Estimated and measured times of compressions, by stage, and how far the time left that they tell was off.

    python -m benchmarks.duration [--model FOLDER] [--preset fast ...] [--target ratio=0.3 ...] [--samples 64 ...]
                                  [--heal 50000] [--evaluate]

Every combination is compressed on one thread. For each, it prints the estimate and the processor time that was needed,
the same by stage, and the least and the largest ratio of the time left as told to the actual one, from a tenth of the
run to nine tenths of it.
"""

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rocket_core.config import Stage, compression_config
from rocket_core.estimates.duration import count_operations
from rocket_core.estimates.operations import Operations
from rocket_core.pipeline import Observer, Progress, compress, requirements
from rocket_core.system.machine_speed import MachineSpeed, measure_speed

_SAMPLE_MODEL = Path(__file__).parents[1] / "examples" / "tiny-llama"
_LEAST, _MOST = 0.1, 0.9


class _Clock(Observer):
    """Time by stage, and what was told about the time left."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.told: list[tuple[float, float]] = []
        self._stage, self._at, self.began = "", time.process_time(), time.perf_counter()

    def on_progress(self, progress: Progress) -> None:
        """Charge the time since the last call to its stage."""
        now = time.process_time()
        self.seconds[self._stage] += now - self._at
        self._stage, self._at = progress.stage, now
        if progress.seconds_left is not None:
            self.told.append((time.perf_counter() - self.began, progress.seconds_left))

    def time_left(self, whole: float) -> str:
        """Return the range of the ratio of the time left as told to the actual one."""
        middle = [(at, left) for at, left in self.told if _LEAST * whole <= at <= _MOST * whole]
        ratios = [left / (whole - at) for at, left in middle]
        return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "never told"


def measure(model: Path, speed: MachineSpeed, settings: Mapping[str, Any]) -> str:
    """Compress once, and return the line of the result."""
    counted: dict[Stage, Operations] = {}

    def count(*of_run: Any, **more: Any) -> Any:
        """Keep what a run counts before it starts."""
        found = count_operations(*of_run, **more)
        counted.update(found or {})
        return found

    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(requirements, "count_operations", count):
        compress(str(model), Path(folder, "out"), compression_config(**settings), observer=clock)
    whole = time.perf_counter() - clock.began
    stages = {stage: (operations.duration(speed), clock.seconds[stage]) for stage, operations in counted.items()}
    estimated, measured = sum(pair[0] for pair in stages.values()), sum(clock.seconds.values())
    by_stage = ", ".join(f"{stage} {pair[0]:.1f} / {pair[1]:.1f}" for stage, pair in stages.items())
    ratio = f"{estimated / measured:.2f}" if counted else "not counted"
    return f"{estimated:.1f} s | {measured:.1f} s | {ratio} | {by_stage} | {clock.time_left(whole)}"


def main() -> None:
    """Print one line for each combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=_SAMPLE_MODEL)
    parser.add_argument("--preset", nargs="+", default=["fast", "best", "max"])
    parser.add_argument("--target", nargs="+", default=["ratio=0.3", "bits=4"])
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--heal", type=int, help="tokens on which the result is healed")
    parser.add_argument("--evaluate", action="store_true", help="compare the result with the original, as by default")
    given = parser.parse_args()
    torch.set_num_threads(1)
    speed = measure_speed()
    print(f"{speed}\n| settings | estimated | measured | ratio | by stage | time left |\n|{'---|' * 6}")
    for preset, target, samples in itertools.product(given.preset, given.target, given.samples):
        key, _, value = target.partition("=")
        calibration = {"samples": samples, "sequence_length": given.length}
        settings = {"preset": preset, key: float(value), "calibration": calibration, "heal_tokens": given.heal}
        line = measure(given.model, speed, settings | ({"evaluate": {}} if given.evaluate else {}))
        print(f"| {preset} {target}, {samples} samples | {line} |", flush=True)


if __name__ == "__main__":
    main()
