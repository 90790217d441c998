"""Work of a compression on an accelerator, counted on the simulated one of the tests.

    python -m benchmarks.device_counts [--ratio 0.3] [--bits 4] [--model FOLDER] [--samples 256] [--lines 12]

For each target it prints what each stage launches, waits for and copies, its peak memory, waits per layer, and the
lines of the library that launch and wait most often. No GPU is needed and no time is measured: counts are those of a
GPU but for attention, which runs as several operations instead of one. Rounding runs as on GPUs: each launch of one of
the kernels in Triton counts as one operation, whose result is computed by the loops for CPUs.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rocket_core.config import compression_config
from rocket_core.linalg import kernels
from rocket_core.linalg.code_grids import Levels
from rocket_core.linalg.kernels import on_cpu, on_gpu
from rocket_core.linalg.kernels.rate import Rate
from rocket_core.linalg.kernels.tries import Tries
from rocket_core.pipeline import Observer, Progress, compress
from tests.reference import simulated_device

_MODEL = Path(__file__).parents[1] / "examples" / "tiny-llama"
SCALES = "scales in Triton"
"""The operation that finds the best scales on GPUs, given to listeners with the weight and the scales that it tries."""
_COLUMNS = ("stage", "operations", "waits", "to device", "MB", "to host", "MB", "peak MB")


@dataclass(kw_only=True, slots=True)
class _Stage:
    """What was counted in a stage."""

    operations: int = 0
    waits: int = 0
    to_device: int = 0
    bytes_to_device: int = 0
    to_host: int = 0
    bytes_to_host: int = 0
    peak: int = 0

    def row(self, name: str) -> tuple[str, ...]:
        """Return the cells of the table."""
        cells = (
            self.operations,
            self.waits,
            self.to_device,
            self.bytes_to_device / 1e6,
            self.to_host,
            self.bytes_to_host / 1e6,
            self.peak / 1e6,
        )
        return (name, *(f"{cell:,.0f}" for cell in cells))


class _Counter(Observer):
    """Adds what was counted since the last step to the stage of the step before."""

    def __init__(self) -> None:
        self.stages: dict[str, _Stage] = {}
        self._stage = "preflight"

    def on_progress(self, progress: Progress) -> None:
        """Receive a step."""
        self.close()
        self._stage = progress.stage

    def close(self) -> None:
        """Add what was counted."""
        counts, memory = simulated_device.counts, simulated_device.memory
        stage = self.stages.setdefault(self._stage, _Stage())
        stage.operations += sum(counts.operations.values())
        stage.waits += sum(counts.waits.values())
        stage.to_device += counts.copies["host to device"]
        stage.bytes_to_device += counts.copied_bytes["host to device"]
        stage.to_host += counts.copies["device to host"]
        stage.bytes_to_host += counts.copied_bytes["device to host"]
        stage.peak = max(stage.peak, memory.peak)
        _waits.update(counts.places)
        _launches.update(counts.lines)
        counts.clear()
        memory.peak = memory.allocated


_waits = simulated_device.Counts().places
_launches = simulated_device.Counts().lines


def round_as_on_gpus() -> None:
    """Let the simulated device round by the code for GPUs, without Triton."""
    kernels.GPUS.add(simulated_device.NAME)
    on_gpu._launch = _launch
    on_gpu.best_scales = _best_scales


def _launch(
    rows: Tensor, codes: Tensor, out: Tensor, matrix: Tensor, steps: Tensor, choice: Any, *, descends: bool
) -> None:
    """Compute what a kernel in Triton computes."""
    simulated_device.counts.launch("kernel in Triton")
    given = (rows, codes, out, matrix, steps, choice.table, choice.lengths, choice.worth)
    rows, codes, out, matrix, steps, table, lengths, worth = map(simulated_device._on_cpu, given)
    levels = Levels(
        least=int(choice.least),
        largest=int(choice.largest),
        table=tuple(table.tolist()) if choice.levels else None,
    )
    rate = Rate(lengths=lengths, worth=worth) if choice.rated else None
    if descends:
        before = codes.clone()
        on_cpu.descend(codes, rows.clone(), matrix, steps, torch.arange(len(codes)), levels, rate, 1)
        torch.mul(codes - before, steps, out=out)
    else:
        out.copy_(on_cpu.round_block(rows, codes, matrix, steps, levels, rate))


def _best_scales(weight: Tensor, importance: Tensor, first: Tensor, tries: Tries) -> Tensor:
    """Compute what the other kernel computes."""
    simulated_device.counts.launch(SCALES)
    for listener in simulated_device.listeners:
        listener(SCALES, (weight, tries))
    best = torch.empty_like(first)
    found = on_cpu.best_scales(*map(simulated_device._on_cpu, (weight, importance, first)), tries)
    simulated_device._on_cpu(best).copy_(found)
    return best


def main() -> None:
    """Count each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, help="0.3, with --bits 4, if neither is given")
    parser.add_argument("--bits", type=float)
    parser.add_argument("--model", type=Path, default=_MODEL)
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--samples", type=int, default=256, help="windows of calibration")
    parser.add_argument("--lines", type=int, default=12, help="how many lines of the library to print")
    given = parser.parse_args()
    targets = {name: value for name in ("ratio", "bits") if (value := getattr(given, name)) is not None}
    simulated_device.install()
    round_as_on_gpus()
    torch.set_num_threads(1)
    for name, value in (targets or {"ratio": 0.3, "bits": 4.0}).items():
        settings = {name: value, "preset": given.preset, "calibration": {"samples": given.samples}}
        print(f"\n{given.model.name}, {name} {value:g}, {given.preset}:")
        _print_counts(given.model, settings, given.lines)


def _print_counts(model: Path, settings: Mapping[str, Any], lines: int) -> None:
    counter = _Counter()
    _waits.clear()
    _launches.clear()
    with tempfile.TemporaryDirectory() as folder:
        config = compression_config(**settings, device=simulated_device.NAME)
        report = compress(str(model), Path(folder) / "out", config, observer=counter)
    counter.close()
    rows = [_COLUMNS, *(stage.row(name) for name, stage in counter.stages.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(widths[0]) if not i else cell.rjust(widths[i]) for i, cell in enumerate(row)))
    layers = len(report.layers)
    stages = counter.stages.values()
    waits, operations = (sum(getattr(stage, name) for stage in stages) for name in ("waits", "operations"))
    print(f"{layers} layers: {operations / layers:,.0f} operations and {waits / layers:,.0f} waits per layer")
    for what, places in (("operations", _launches), ("waits", _waits)):
        print(f"most {what}:")
        for place, count in places.most_common(lines):
            print(f"{count:8,} {place}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
