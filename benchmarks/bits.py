"""Quality per stored byte: Rocket at fractions of the bytes of 16 bits per weight, and GPTQ at 4, 3 and 2 bits.

    python -m benchmarks.bits --model FOLDER --calibrate FILE --measure FILE --out FOLDER [--seeds 3] [--quick]

The model is converted to float16 first. It writes OUT/bits.json with every run and OUT/bits.md with tables: the bytes
of the linear layers in the written file, KL divergence from the dense model, top-1 agreement and perplexity; and for
the requirements, which are those of stories260K with the TinyStories texts, whether they hold. Each run is saved when
it ends, and saved runs are not repeated. Rocket's rows come with `storage` `memory`, where codes have a fixed length,
and `file`, where they may be entropy coded. Runs at a fraction share one profile for each preset, storage and seed;
those that are timed make their own, and count the CPU time from loading the model to the written file.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.half_precision import copy_in_half_precision
from benchmarks.measured_runs import (
    Results,
    calibration,
    file_bytes,
    mean_and_spread,
    requirement,
    run,
    saved_runs,
)
from rocket_core.allocation import Allocator
from rocket_core.config import compression_config
from rocket_core.pipeline import ProfileCache, profile_model

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
# The whole model file, of its bytes with 16 bits for every weight, and the upper bound on its excess perplexity.
FILE_FRACTION = 0.27
MOST_FILE_EXCESS = 0.06
# The part of the bytes asked for that may be left over.
MOST_UNUSED = 0.002
# Upper bounds on CPU time: of `fast`, of its time with kinds that keep 16 bits; of `best`, of that of `fast`.
MOST_TIME = {"fast": 2.0, "best": 3.0}
TIMED_FRACTION = 0.4
# Percents of the bytes at which what the allocation leaves is predicted.
MANY_PERCENT = range(15, 86)
WIDE_KINDS = ("low_rank", "factored", "shared", "sparse")


def against_uniform(
    given: argparse.Namespace, model: Path, preset: str, seed: int, profiles: ProfileCache
) -> dict[str, Any]:
    """Return the largest predicted loss of an allocation, as a part of that of one format at equal bytes."""
    config = compression_config(preset=preset, storage="memory", budget="bytes", calibration=calibration(given, seed))
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_model(str(model), Path(folder), config, profiles=profiles)
    formats = [
        {
            # Groups as large as a whole output are one format, whatever the layers' sizes.
            (one.bits, min(one.group_size or layer.d_in, layer.d_in) % layer.d_in, one.scale_bits): one
            for one in layer.candidates
            if one.kind == "quantized"
        }
        for layer in profile.layers
    ]
    parts = {}
    for layer_format in set.intersection(*(set(one) for one in formats)):
        uniform = [one[layer_format] for one in formats]
        ratio = 1 - sum(one.stored_bytes for one in uniform) / profile.compressible_bytes
        allocator = Allocator(
            profile.layers,
            objective=profile.objective,
            cap_slack=profile.cap_slack,
            budget_unit=profile.budget_unit,
            itemsize=profile.itemsize,
        )
        found = allocator.allocate(ratio - 1e-12)
        # Where both are the same candidates, their losses may be added up in another order.
        parts[layer_format] = round(found.total_error / sum(one.loss or 0.0 for one in uniform), 12)
    return {"seed": seed, "formats": len(parts), "part": max(parts.values())}


def left_over(
    given: argparse.Namespace, model: Path, preset: str, storage: str, seed: int, profiles: ProfileCache
) -> dict[str, Any]:
    """Return the largest part of the bytes asked for that the allocation leaves, by the profile, at many sizes."""
    config = compression_config(preset=preset, storage=storage, budget="bytes", calibration=calibration(given, seed))
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_model(str(model), Path(folder), config, profiles=profiles)
    predictor, parts = profile.predictor(), []
    for percent in MANY_PERCENT:
        chosen = predictor.chosen(predictor.at_ratio(round(1 - percent / 100, 6)))
        stored = sum(candidate.stored_bytes for _, candidate in chosen)
        parts.append(1 - 100 * stored / (percent * profile.compressible_bytes))
    return {"seed": seed, "sizes": len(parts), "above": sum(part > MOST_UNUSED for part in parts), "left": max(parts)}


def gptq_name(bits: int) -> str:
    """Return the name of GPTQ's runs."""
    return f"gptq int{bits}"


def rocket_name(preset: str, storage: str, fraction: float) -> str:
    """Return the name of Rocket's runs at a fraction of the bytes."""
    return f"{preset} at {fraction:g}{', fixed length' if storage == 'memory' else ''}"


def file_name(preset: str, storage: str) -> str:
    """Return the name of Rocket's runs at a fraction of the bytes of the file."""
    return f"{preset}, file at {FILE_FRACTION:g}{', fixed length' if storage == 'memory' else ''}"


def timed_name(preset: str, *, wide: bool) -> str:
    """Return the name of a run that is timed with its profile."""
    return f"{preset} alone{', kinds of 16 bits' if wide else ''}"


def uniform_name(preset: str) -> str:
    """Return the name of the comparison with one format for all layers."""
    return f"{preset}, predicted loss"


def left_name(preset: str, storage: str) -> str:
    """Return the name of the prediction of the bytes that are left at many sizes."""
    return f"{preset}, bytes left over{', fixed length' if storage == 'memory' else ''}"


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table of all runs."""
    columns = ("fraction", "file_fraction", "kl", "excess", "agreement")
    yield "| | bytes of the linears | file | KL, nats per token | excess perplexity | same likeliest token | CPU s |"
    yield "|---|---|---|---|---|---|---|"
    for name in results.names:
        if not results.values(name, "kl"):
            continue
        cells = [mean_and_spread(results.values(name, of)) for of in columns]
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
        yield from size_bars(results, preset)
        uniform = results.values(uniform_name(preset), "part")
        if uniform:
            yield requirement(f"{preset}: predicted loss, of that of one format at equal bytes", [max(uniform)], 1.0)
        others = timed_name("fast", wide=preset == "fast")
        seconds = results.parts(timed_name(preset, wide=False), others, "cpu_seconds")
        if seconds:
            yield requirement(f"{preset}: CPU time, of that of {others}", seconds, MOST_TIME[preset])


def size_bars(results: Results, preset: str) -> Iterator[str]:
    """Yield the requirements on the sizes that a preset reaches, and on the file's excess perplexity."""
    found = [excess for storage in STORAGES if (excess := results.values(file_name(preset, storage), "excess"))]
    if found:
        best = min(found, key=statistics.mean)
        yield requirement(f"{preset}, file at {FILE_FRACTION:g}, the better: excess perplexity", best, MOST_FILE_EXCESS)
    asked = [
        (rocket_name(preset, storage, fraction), "fraction", fraction) for storage in STORAGES for fraction in FRACTIONS
    ]
    asked += [(file_name(preset, storage), "file_fraction", FILE_FRACTION) for storage in STORAGES]
    over = [value / fraction - 1 for name, of, fraction in asked for value in results.values(name, of)]
    if over:
        yield requirement(f"{preset}: bytes exceeded, by a part of them", [max(over)], 0.0)
        yield requirement(f"{preset}: bytes left over, of them", [-min(over)], MOST_UNUSED)
    left = [part for storage in STORAGES for part in results.values(left_name(preset, storage), "left")]
    if left:
        sizes = f"at {len(MANY_PERCENT)} sizes, predicted"
        yield requirement(f"{preset}: bytes left over {sizes}, of them", [max(left)], MOST_UNUSED)


def planned(presets: Sequence[str], size: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the settings of every run that may reuse a profile.

    Args:
        presets: presets of Rocket.
        size: bytes of the model file with 16 bits for every weight.
    """
    for bits in GPTQ_BITS:
        yield gptq_name(bits), {"method": "gptq", "code_bits": bits, "group_size": 32}
    for preset, storage in itertools.product(presets, STORAGES):
        chosen = {"preset": preset, "storage": storage}
        for fraction in FRACTIONS:
            ratio = round(1 - fraction, 6)
            yield rocket_name(preset, storage, fraction), chosen | {"budget": "bytes", "ratio": ratio}
        yield file_name(preset, storage), chosen | {"target_bytes": int(FILE_FRACTION * size)}


def timed(presets: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the settings of every run whose time counts, profile included."""
    at = {"budget": "bytes", "ratio": 1 - TIMED_FRACTION}
    yield timed_name("fast", wide=True), at | {"preset": "fast", "kinds": WIDE_KINDS}
    for preset in presets:
        yield timed_name(preset, wide=False), at | {"preset": preset}


def asked_runs(
    given: argparse.Namespace, model: Path, presets: Sequence[str], profiles: ProfileCache
) -> Iterator[tuple[str, int, Callable[[], dict[str, Any]]]]:
    """Yield name, seed and function of every run."""
    for seed in range(given.seeds):
        if not given.times:
            for name, settings in planned(presets, file_bytes(model)):
                yield name, seed, partial(run, given, model, settings, seed, profiles)
            for preset in presets:
                yield uniform_name(preset), seed, partial(against_uniform, given, model, preset, seed, profiles)
            for preset, storage in itertools.product(presets, STORAGES):
                predict = partial(left_over, given, model, preset, storage, seed, profiles)
                yield left_name(preset, storage), seed, predict
        for name, settings in timed(presets):
            yield name, seed, partial(run, given, model, settings, seed, None)


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
    parser.add_argument("--times", action="store_true", help="only the runs whose CPU time counts")
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
            list(asked_runs(given, model, presets, profiles)),
        )
    results = Results(rows)
    lines = [*table(results), "", *bars(results, presets)]
    (given.out / "bits.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
