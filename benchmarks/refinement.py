"""What refinement wins back: the presets `best` and `max` at the same sizes.

    python -m benchmarks.refinement --model FOLDER --calibrate FILE --measure FILE --out FOLDER [--seeds 3]

The model is converted to float16 first. Both presets compress it to 0.3 and 0.5 of the parameters removed, with
factored kinds alone, and to 0.2 and 0.15 of the bytes of 16 bits per weight, with all kinds. It writes
OUT/refinement.json with every run, and OUT/refinement.md with tables: KL divergence from the dense model, excess
perplexity and time; and the requirements, which are those of stories260K with the TinyStories texts. Each run is saved
when it ends, and saved runs are not repeated.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.half_precision import copy_in_half_precision
from benchmarks.measured_runs import Results, mean_and_spread, requirement, run, saved_runs
from benchmarks.quality import FACTORED
from rocket_core.pipeline import ProfileCache

PRESETS = ("best", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A size to compress to.

    Attributes:
        name: how tables call it.
        settings: what asks for it.
        most_kl: upper bound on the KL divergence of `max`, as a part of that of `best`; None for no requirement.
    """

    name: str
    settings: Mapping[str, Any]
    most_kl: float | None = None


SIZES = (
    Size(name="factored, 0.3 of the parameters", settings={"ratio": 0.3, "kinds": FACTORED}),
    Size(name="factored, 0.5 of the parameters", settings={"ratio": 0.5, "kinds": FACTORED}, most_kl=0.6),
    Size(name="0.2 of the bytes", settings={"ratio": 0.8, "budget": "bytes"}, most_kl=0.75),
    Size(name="0.15 of the bytes", settings={"ratio": 0.85, "budget": "bytes"}, most_kl=0.75),
)
# Upper bound on the CPU time of `max`, as a part of that of `best`.
_MOST_TIME = 4.0


def row_name(preset: str, size: Size) -> str:
    """Return the name of the runs of a preset at a size."""
    return f"{preset}, {size.name}"


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table of all runs."""
    yield "| | bytes of the linears | KL, nats per token | of that of `best` | excess perplexity | CPU s |"
    yield "|---|---|---|---|---|---|"
    for size in SIZES:
        for preset in PRESETS:
            name = row_name(preset, size)
            parts = results.parts(name, row_name("best", size))
            if parts:
                cells = [mean_and_spread(results.values(name, of)) for of in ("fraction", "kl")]
                cells.append("" if preset == "best" else mean_and_spread(parts))
                cells += [mean_and_spread(results.values(name, of)) for of in ("excess", "cpu_seconds")]
                yield f"| {name} | {' | '.join(cells)} |"


def bars(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table of requirements: bound, measured mean, and whether it holds."""
    yield "| `max`, of `best` | asked | found | |"
    yield "|---|---|---|---|"
    times: list[float] = []
    for size in SIZES:
        names = row_name("max", size), row_name("best", size)
        parts = results.parts(*names)
        if parts and size.most_kl is not None:
            yield requirement(f"KL, {size.name}", parts, size.most_kl)
        times += results.parts(*names, of="cpu_seconds")
    if times:
        yield requirement("CPU time, all sizes", times, _MOST_TIME)


def main() -> None:
    """Run the missing combinations, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder")
    parser.add_argument("--calibrate", required=True, help="as `rocket compress --calibration`")
    parser.add_argument("--measure", required=True, help="as `rocket compress --evaluate`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration draws")
    given = parser.parse_args()
    if not (given.model / "config.json").is_file():
        parser.error(f"{given.model} is not the folder of a model; name one that has config.json and safetensors")
    given.samples, given.length, given.windows = 128, 256, 96
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = copy_in_half_precision(given.model, Path(scratch, given.model.resolve().name))

        def measure(preset: str, size: Size, seed: int) -> dict[str, Any]:
            """Compress and measure once; nothing is cached between runs, as their times are compared."""
            with tempfile.TemporaryDirectory() as folder:
                return run(given, model, {"preset": preset, **size.settings}, seed, ProfileCache(Path(folder)))

        rows = saved_runs(
            given.out / "refinement.json",
            {"model": given.model.resolve().name, "samples": given.samples, "windows": given.windows},
            [
                (row_name(preset, size), seed, lambda preset=preset, size=size, seed=seed: measure(preset, size, seed))  # type: ignore[misc]
                for seed in range(given.seeds)
                for size in SIZES
                for preset in PRESETS
            ],
        )
    results = Results(rows)
    lines = [*table(results), "", *bars(results)]
    (given.out / "refinement.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
