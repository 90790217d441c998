"""A compression on one device next to one with two processes: `python -m benchmarks.processes --model FOLDER`.

By default both are on the CPU, one thread for each process, which needs two idle cores. `--device cuda:0` compares one
process on a GPU with two on it, `--device cuda:0 --device cuda:1` with one on each of two.
"""

import argparse
import hashlib
import tempfile
import time
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
    parser.add_argument("--device", action="append", help="a device, or both; default cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, *second = given.device or ["cpu"]
    # The first run compiles the loops of rounding.
    measured(argparse.Namespace(**vars(given) | {"samples": 4}), first, {"bits": 4.0})
    print("| target | stage | one process, s | two, s | ratio |\n|---|---|---|---|---|")
    for name, target in _TARGETS.items():
        one, alone, expected = measured(given, first, target)
        two, shared, digest = measured(given, ",".join([first, *(second or [first])]), target)
        assert digest == expected, f"{name}: two processes write other bytes than one"
        stages = {stage.name: stage.seconds for stage in two.stages}
        for stage in one.stages:
            after = stages[stage.name]
            print(f"| `{name}` | {stage.name} | {stage.seconds:.1f} | {after:.1f} | {after / stage.seconds:.2f} |")
        print(f"| `{name}` | **all** | {alone:.1f} | {shared:.1f} | **{shared / alone:.2f}** |", flush=True)


if __name__ == "__main__":
    main()
