"""A compression in one process next to some in several: `python -m benchmarks.processes --model FOLDER`.

By default two processes share the CPU, one thread each, which needs two idle cores. `--device cuda:0 --processes 2
--processes 4` compares one process on a GPU with two and four on it, `--device cuda:0 --device cuda:1` with one on each
of two.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import torch

from rocket_core import compress, compression_config
from rocket_core.report.schema import CompressionReport

_TARGETS = {"--ratio 0.3": {"ratio": 0.3}, "--bits 4": {"bits": 4.0}}


def measured(given: argparse.Namespace, device: str, target: dict[str, float]) -> tuple[CompressionReport, float, str]:
    """Return the report of a compression, its seconds, and the hash of its weights."""
    calibration = {"dataset": given.calibrate, "samples": given.samples, "sequence_length": given.length}
    with tempfile.TemporaryDirectory() as folder:
        config = compression_config(**target, preset=given.preset, device=device, calibration=calibration)
        began = time.monotonic()
        report = compress(given.model, Path(folder, "out"), config)
        seconds = time.monotonic() - began
        files = sorted(Path(folder, "out").rglob("*.safetensors"))
        digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    return report, seconds, digest


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/tiny-llama", help="folder of a model")
    parser.add_argument("--calibrate", default="builtin", help="as `rocket compress --calibration`")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--device", action="append", help="may be repeated; default cpu")
    parser.add_argument(
        "--processes", type=int, action="append", help="may be repeated; one for each device, at least 2"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    devices = given.device or ["cpu"]
    counts = given.processes or [max(2, len(devices))]
    # The first run compiles the loops of rounding.
    measured(argparse.Namespace(**vars(given) | {"samples": 4}), devices[0], {"bits": 4.0})
    print("| target | stage | one process, s |" + "".join(f" {count}, s |" for count in counts))
    print("|---" * (3 + len(counts)) + "|")
    different: list[str] = []
    for name, target in _TARGETS.items():
        one, alone, expected = measured(given, devices[0], target)
        stages, totals = [_seconds(one)], [alone]
        for count in counts:
            several, seconds, digest = measured(given, ",".join(islice(cycle(devices), count)), target)
            different += [f"{count} with {name}"] * (digest != expected)
            stages.append(_seconds(several))
            totals.append(seconds)
        for stage in stages[0]:
            print(f"| `{name}` | {stage} |" + "".join(f" {found[stage]:.1f} |" for found in stages))
        print(f"| `{name}` | **all** |" + "".join(f" {seconds:.1f} |" for seconds in totals), flush=True)
    if different:
        sys.exit(f"other bytes than one process wrote: {', '.join(different)}")


def _seconds(report: CompressionReport) -> dict[str, float]:
    return {stage.name: stage.seconds for stage in report.stages}


if __name__ == "__main__":
    main()
