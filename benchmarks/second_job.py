"""Time saved by a cached profile, when a model is compressed at one ratio and then at another.

The second run neither calibrates nor profiles; it only allocates, compresses the chosen layers and writes them. Each
run is a separate process, as jobs are, on one thread by default.

    python -m benchmarks.second_job [--model examples/tiny-llama] [--dataset builtin] [--ratios 0.3 0.5]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rocket_core.config import BUILTIN_DATASET

MODEL = "examples/tiny-llama"
RATIOS = (0.3, 0.5)
BAR = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Cost of a run.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time of the process, including loading.
        stages: seconds of each stage.
    """

    seconds: float
    cpu_seconds: float
    stages: dict[str, float]

    def line(self, name: str) -> str:
        """Return a line for people."""
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stages.items() if seconds >= 0.05)
        return f"  {name}: {sum(self.stages.values()):.1f} s of stages ({stages}); {self.cpu_seconds:.1f} s of CPU time"


def measure(model: str, dataset: str, ratios: tuple[float, float], *, samples: int | None, threads: int) -> list[Job]:
    """Run twice, the second time with the profile of the first, and return the costs.

    Args:
        model: folder of a checkpoint.
        dataset: calibration data.
        ratios: compression ratios of the two runs.
        samples: calibration samples; None takes the default.
        threads: number of threads in each run.
    """
    with tempfile.TemporaryDirectory(prefix="rocket-second-job-") as folder:
        return [
            _run(
                Path(folder), [model, "--calibration", dataset, "--ratio", str(ratio)], samples=samples, threads=threads
            )
            for ratio in ratios
        ]


def _run(folder: Path, arguments: list[str], *, samples: int | None, threads: int) -> Job:
    output = folder / f"out-{arguments[-1]}"
    code = "from rocket_cli.main import main; main()"
    command = [sys.executable, "-c", code, "compress", arguments[0], str(output), *arguments[1:]]
    command += ["--profiles", str(folder / "profiles")] + ([] if samples is None else ["--samples", str(samples)])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    quiet = subprocess.DEVNULL
    subprocess.run(command, check=True, env=environment, stdout=quiet, stderr=quiet)  # noqa: S603
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((output / "report.json").read_text())
    return Job(
        seconds=seconds,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        stages={stage["name"]: stage["seconds"] for stage in report["stages"]},
    )


def main(
    model: str = MODEL,
    dataset: str = BUILTIN_DATASET,
    ratios: tuple[float, float] = RATIOS,
    *,
    samples: int | None = None,
    threads: int = 1,
) -> None:
    """Print both runs, and the second as a fraction of the first."""
    print(f"a second job on a kept profile: {model}, ratio {ratios[0]} and then {ratios[1]}, threads: {threads}")
    first, second = measure(model, dataset, ratios, samples=samples, threads=threads)
    print(first.line("first"))
    print(second.line("second"))
    part = sum(second.stages.values()) / sum(first.stages.values())
    print(
        f"  the second takes {part:.2f} of the first's stages (bar {BAR}: {'met' if part <= BAR else 'MISSED'}), "
        f"{second.cpu_seconds / first.cpu_seconds:.2f} of its CPU time with loading, "
        f"{second.seconds / first.seconds:.2f} by the clock",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="folder of a checkpoint")
    parser.add_argument("--dataset", default=BUILTIN_DATASET, help="what to calibrate on")
    parser.add_argument("--ratios", type=float, nargs=2, default=RATIOS, help="compression ratios of the two runs")
    parser.add_argument("--samples", type=int, help="calibration samples; default as of rocket compress")
    parser.add_argument("--threads", type=int, default=1, help="of either run")
    options = parser.parse_args()
    first_ratio, second_ratio = options.ratios
    main(
        options.model,
        options.dataset,
        (first_ratio, second_ratio),
        samples=options.samples,
        threads=options.threads,
    )
