"""Quality per stored byte: Rocket at fractions of the bytes of 16 bits per weight, and GPTQ at 4, 3 and 2 bits.

    python -m benchmarks.bits --model FOLDER --calibrate FILE --measure FILE --out FOLDER [--seeds 3] [--quick]

The model is converted to float16 first. It writes OUT/bits.json with every run and OUT/bits.md with tables: the bytes
of the linear layers in the written file, KL divergence from the dense model, top-1 agreement and perplexity; and for
the requirements, which are those of stories260K with the TinyStories texts, whether they hold. Each run is saved when
it ends, and saved runs are not repeated. Rocket's rows come with `storage` `memory`, where codes have a fixed length,
and `file`, where they may be entropy coded.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.half_precision import copy_in_half_precision
from rocket_core.config import compression_config
from rocket_core.engines import ENGINES
from rocket_core.pipeline import ProfileCache, Progress, compress
from rocket_core.report.quality import Difference
from rocket_core.report.schema import CompressionReport

FRACTIONS = (0.5, 0.4, 0.3, 0.281, 0.25, 0.2, 0.15)
GPTQ_BITS = (4, 3, 2)
PRESETS = ("fast", "best")
STORAGES = ("memory", "file")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A requirement on the KL divergence at a fraction of the bytes, as a part of that of GPTQ.

    Attributes:
        storage: what Rocket keeps small.
        fraction: bytes of the linear layers, of those of 16 bits per weight.
        bits: bits of GPTQ.
        part: upper bound on the part.
    """

    storage: str
    fraction: float
    bits: int
    part: float


BARS = (
    Bar(storage="memory", fraction=0.281, bits=4, part=0.65),
    Bar(storage="memory", fraction=0.2, bits=3, part=0.58),
    Bar(storage="memory", fraction=0.15, bits=2, part=0.40),
    Bar(storage="file", fraction=0.25, bits=4, part=0.70),
    Bar(storage="file", fraction=0.2, bits=3, part=0.42),
    Bar(storage="file", fraction=0.15, bits=2, part=0.35),
)
# Upper bounds on the excess perplexity, which is perplexity over dense less 1, by fraction of the bytes. For the better
# of both storages.
MOST_EXCESS: Mapping[float, float] = {0.5: 0.002, 0.4: 0.004, 0.3: 0.016, 0.25: 0.045, 0.2: 0.18}


def stored_bytes(folder: Path, layers: Collection[str]) -> int:
    """Return the bytes of all tensors of some layers in the safetensors of a folder, biases excluded.

    Floating-point numbers count as 16 bits at most.
    """
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                layer, _, last = name.rpartition(".")
                if layer in layers and last != "bias":
                    tensor = tensors.get_tensor(name)
                    itemsize = tensor.element_size()
                    total += tensor.numel() * (min(2, itemsize) if tensor.is_floating_point() else itemsize)
    return total


def run(
    given: argparse.Namespace, model: Path, settings: Mapping[str, Any], seed: int, profiles: ProfileCache
) -> dict[str, Any]:
    """Compress and measure once."""
    with tempfile.TemporaryDirectory() as folder:
        report, seconds = compressed(given, model, settings, seed, profiles, Path(folder))
        evaluation = report.evaluation
        assert evaluation is not None
        fraction = stored_fraction(Path(folder, evaluation.export), report)
    return {
        "seed": seed,
        "fraction": fraction,
        **loss_figures(evaluation.before.perplexity, evaluation.after.perplexity, evaluation.difference),
        "cpu_seconds": seconds,
    }


def compressed(
    given: argparse.Namespace,
    model: Path,
    settings: Mapping[str, Any],
    seed: int,
    profiles: ProfileCache,
    folder: Path,
) -> tuple[CompressionReport, float]:
    """Compress into an empty folder and measure; return the report, and the CPU seconds before the evaluation."""
    config = compression_config(
        export=ENGINES[settings.get("engine", "rocket")].exports[:1],
        calibration={
            "dataset": str(given.calibrate),
            "samples": given.samples,
            "sequence_length": given.length,
            "seed": seed,
        },
        evaluate={"dataset": str(given.measure), "samples": given.windows, "sequence_length": given.length},
        **settings,
    )
    began = time.process_time()
    seconds: list[float] = []

    def note(progress: Progress) -> None:
        """Record the time before the evaluation, which is not a cost of the method."""
        if progress.stage == "evaluating" and not seconds:
            seconds.append(time.process_time() - began)

    report = compress(str(model), folder, config, on_progress=note, profiles=profiles)
    return report, seconds[0]


def stored_fraction(artifact: Path, report: CompressionReport) -> float:
    """Return the bytes of the linear layers of an artifact, as a part of those of 16 bits per weight."""
    stored = stored_bytes(artifact, {layer.name for layer in report.layers})
    return stored / sum(2 * layer.d_in * layer.d_out for layer in report.layers)


def loss_figures(before: float | None, after: float | None, difference: Difference) -> dict[str, float | None]:
    """Return what a model lost: of an encoder its `drift`, else `excess` perplexity, `kl` and `agreement`."""
    if difference.cosine_drift is not None:
        return {"drift": difference.cosine_drift}
    assert before is not None
    assert after is not None
    return {"excess": after / before - 1, "kl": difference.kl_divergence, "agreement": difference.top1_agreement}


class Results:
    """Runs, indexed by name.

    Args:
        rows: the results of `run`, each with a `name`.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self.names = list(dict.fromkeys(row["name"] for row in rows))

    def values(self, name: str, of: str) -> list[float]:
        """Return a value for each seed, in the order of the seeds."""
        rows = sorted((row for row in self._rows if row["name"] == name), key=lambda row: row["seed"])
        return [row[of] for row in rows]

    def parts(self, name: str, others: str, of: str = "kl") -> list[float]:
        """Return the KL divergence, or another value, as a part of another's, for each seed that both have."""
        own, other = ({row["seed"]: row[of] for row in self._rows if row["name"] == one} for one in (name, others))
        return [own[seed] / other[seed] for seed in sorted(own.keys() & other.keys()) if other[seed] > 0]


def gptq_name(bits: int) -> str:
    """Return the name of GPTQ's runs."""
    return f"gptq int{bits}"


def rocket_name(preset: str, storage: str, fraction: float) -> str:
    """Return the name of Rocket's runs at a fraction of the bytes."""
    return f"{preset} at {fraction:g}{', fixed length' if storage == 'memory' else ''}"


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table of all runs."""
    yield "| | bytes of the linears | KL, nats per token | excess perplexity | same likeliest token | CPU s |"
    yield "|---|---|---|---|---|---|"
    for name in results.names:
        cells = [mean_and_spread(results.values(name, of)) for of in ("fraction", "kl", "excess", "agreement")]
        yield f"| {name} | {' | '.join(cells)} | {statistics.median(results.values(name, 'cpu_seconds')):.0f} |"


def bars(results: Results, presets: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table of requirements: bound, measured mean, and whether it holds."""
    yield "| | asked | found | |"
    yield "|---|---|---|---|"
    for preset in presets:
        for bar in BARS:
            name = rocket_name(preset, bar.storage, bar.fraction)
            parts = results.parts(name, gptq_name(bar.bits))
            if parts:
                yield requirement(f"{name}: KL, of that of {gptq_name(bar.bits)}", parts, bar.part)
        for fraction, most in MOST_EXCESS.items():
            names = [rocket_name(preset, storage, fraction) for storage in STORAGES]
            found = [excess for name in names if (excess := results.values(name, "excess"))]
            if found:
                best = min(found, key=statistics.mean)
                yield requirement(f"{preset} at {fraction:g}, the better: excess perplexity", best, most)
        over = [
            value / fraction - 1
            for storage in STORAGES
            for fraction in FRACTIONS
            for value in results.values(rocket_name(preset, storage, fraction), "fraction")
        ]
        if over:
            yield requirement(f"{preset}: bytes exceeded, by a part of them", [max(over)], 0.0)


def requirement(what: str, found: Sequence[float], most: float) -> str:
    """Return the line of a requirement: bound, measured mean, and whether it holds."""
    holds = "holds" if statistics.mean(found) <= most else "missed"
    return f"| {what} | at most {most:.3g} | {mean_and_spread(found)} | {holds} |"


def mean_and_spread(values: Sequence[float]) -> str:
    """Return mean and half the distance from the smallest to the largest."""
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.4g}" + (f" ± {spread:.2g}" if len(values) > 1 else "")


def planned(presets: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the settings of every run."""
    for bits in GPTQ_BITS:
        yield gptq_name(bits), {"method": "gptq", "code_bits": bits, "group_size": 32}
    for preset, storage in itertools.product(presets, STORAGES):
        for fraction in FRACTIONS:
            yield (
                rocket_name(preset, storage, fraction),
                {"preset": preset, "storage": storage, "budget": "bytes", "ratio": round(1 - fraction, 6)},
            )


def saved_runs(
    file: Path, keys: Mapping[str, Any], runs: Sequence[tuple[str, int, Callable[[], dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """Run what is missing in a file of runs, and return the runs asked for.

    Args:
        file: a JSON file, which need not exist yet; written after every run.
        keys: members that a saved run must have, with these values.
        runs: name, seed and function of each run.
    """
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    asked = []
    for name, seed, measure in runs:
        key = {"name": name, "seed": seed, **keys}
        row = next((row for row in rows if key.items() <= row.items()), None)
        if row is None:
            row = key | measure()
            rows.append(row)
            print(json.dumps(row), flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
        asked.append(row)
    return asked


def main() -> None:
    """Run the missing combinations, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder")
    parser.add_argument("--calibrate", required=True, help="as `rocket compress --calibration`")
    parser.add_argument("--measure", required=True, help="as `rocket compress --evaluate`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration draws")
    parser.add_argument("--presets", choices=PRESETS, nargs="+", default=PRESETS)
    parser.add_argument("--quick", action="store_true", help="few windows and the preset fast alone: minutes, noisy")
    given = parser.parse_args()
    if not (given.model / "config.json").is_file():
        parser.error(f"{given.model} is not the folder of a model; name one that has config.json and safetensors")
    for text in (given.calibrate, given.measure):
        if text.endswith((".txt", ".jsonl")) and not Path(text).is_file():
            parser.error(f"there is no file {text}; name a text file, or builtin")
    given.samples, given.length, given.windows = (32, 256, 24) if given.quick else (128, 256, 96)
    presets = ("fast",) if given.quick else tuple(given.presets)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = copy_in_half_precision(given.model, Path(scratch, given.model.resolve().name))
        profiles = ProfileCache(Path(scratch, "profiles"))
        rows = saved_runs(
            given.out / "bits.json",
            {"model": given.model.resolve().name, "samples": given.samples, "windows": given.windows},
            [
                (name, seed, lambda settings=settings, seed=seed: run(given, model, settings, seed, profiles))  # type: ignore[misc]
                for seed in range(given.seeds)
                for name, settings in planned(presets)
            ],
        )
    results = Results(rows)
    lines = [*table(results), "", *bars(results, presets)]
    (given.out / "bits.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
