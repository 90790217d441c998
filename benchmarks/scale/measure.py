"""One measured compression, for `benchmarks.scale`."""

import argparse
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.scale.operations import Operations, Product, Spent, clock_of, seconds_in_mm
from rocket_core.config import compression_config
from rocket_core.pipeline import Observer, Progress, compress, requirements
from rocket_core.system.devices import resolve_device

_MOST_LISTED = 25
_SAMPLE_SECONDS = 0.5


@dataclass(kw_only=True, slots=True)
class _Meter(Observer):
    """Time by stage and layer, of the processor or of an accelerator, and the largest work folder."""

    folder: Path
    operations: Operations | None
    clock: Callable[[], float]
    seconds: dict[str, float]
    layers: dict[str, float]
    memory: int = 0
    disk: int = 0
    _at: float = 0.0
    _stage: str = "start"
    _layer: str = ""

    def on_progress(self, progress: Progress) -> None:
        """Charge the time since the last call to the stage and layer that it belonged to."""
        now = self.clock()
        self.seconds[self._stage] += now - self._at
        if self._layer:
            self.layers[f"{self._stage} {self._layer}"] += now - self._at
        self._at, self._stage, self._layer = now, progress.stage, progress.layer or ""
        if self.operations is not None:
            self.operations.stage = progress.stage
        self.disk = max(self.disk, sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file()))


def main() -> None:
    """Compress a model once, and print what it took as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="settings of the compression, as JSON")
    parser.add_argument("--operations", action="store_true", help="count operations, which takes some time itself")
    parser.add_argument("--swap", action="store_true", help="let a run start that needs more than the free memory")
    given = parser.parse_args()
    config = compression_config(**given.settings)
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    record = Operations(device) if given.operations else None
    meter = _Meter(
        folder=given.out,
        operations=record,
        clock=clock_of(device),
        seconds=defaultdict(float),
        layers=defaultdict(float),
    )
    if given.swap:
        mock.patch.object(requirements, "free_memory", return_value=sys.maxsize).start()
    meter._at, wall = meter.clock(), time.perf_counter()
    with record or nullcontext(), _sampled_memory() as held:
        report = compress(given.model, given.out, config, observer=meter)
    result: dict[str, Any] = {
        "seconds": sum(meter.seconds.values()),
        "wall_seconds": time.perf_counter() - wall,
        "stages": {stage: round(seconds, 3) for stage, seconds in meter.seconds.items()},
        "layers": {layer: round(seconds, 3) for layer, seconds in meter.layers.items()},
        "peak_memory_bytes": {stage.name: stage.peak_memory_bytes for stage in report.stages},
        "peak_device_bytes": {stage.name: stage.peak_device_bytes for stage in report.stages},
        "peak_held_bytes": max(held, default=0),
        "disk_bytes": meter.disk,
        "total_error": report.allocation.total_error,
        "kinds": {
            layer.name: [layer.kind, layer.reconstruction_error, layer.achieved_error] for layer in report.layers
        },
        "device": report.stages[-1].device,
    }
    if record is not None:
        result["operations"] = _summary(record, device)
    json.dump(result, sys.stdout)


@contextmanager
def _sampled_memory() -> Iterator[list[int]]:
    """Sample the bytes that this process holds, in memory and swapped out, while the context is active."""
    samples: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            samples.append(sum(int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmSwap")))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        ended.set()
        sampler.join()


def _summary(record: Operations, device: torch.device) -> dict[str, Any]:
    products: dict[Product, Spent] = defaultdict(Spent)
    for (_stage, product), spent in record.products.items():
        _merge(products[product], spent)
    taken, ideal = seconds_in_mm(products.items(), device)
    return {
        "products": _sums(record.products.values()),
        "factorizations": _sums(record.factorizations.values()),
        "others": _sums(record.others.values()),
        "compared_seconds": taken,
        "mm_seconds": ideal,
        "most_expensive": _listed(record),
    }


def _merge(total: Spent, part: Spent) -> None:
    total.calls += part.calls
    total.operations += part.operations
    total.seconds += part.seconds


def _sums(parts: Any) -> dict[str, float]:
    total = Spent()
    for part in parts:
        _merge(total, part)
    return {"calls": total.calls, "operations": total.operations, "seconds": round(total.seconds, 3)}


def _listed(record: Operations) -> list[str]:
    every: dict[Any, Spent] = {}
    for part in (record.products, record.factorizations, record.others):
        every.update(part)
    ordered = sorted(every.items(), key=lambda pair: -pair[1].seconds)[:_MOST_LISTED]
    return [
        f"{stage} {what}: {spent.seconds:.1f} s, {spent.calls} calls, {spent.operations:.3g} operations"
        for (stage, what), spent in ordered
    ]


if __name__ == "__main__":
    main()
