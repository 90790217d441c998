"""What refinement and healing win back, at the same sizes.

    python -m benchmarks.refinement --out FOLDER --stories FOLDER --calibrate FILE --measure FILE [--seeds 3]
        [--encoder FOLDER --encoder-calibrate FILE --encoder-measure FILE] [--environments FOLDER]
        [--only PART ...] [--rows ROW ...] [--sizes TEXT ...]

Its parts, of which `--only` takes some, and `--rows` and `--sizes` some of the runs:

- `stories`: stories260K with the TinyStories texts. `best`, `max`, and `best` with healing after it; at 0.3 and 0.5 of
  the parameters removed, with factored kinds alone, and at 0.2 and 0.15 of the bytes of 16 bits per weight.
- `tiny-llama`: examples/tiny-llama. `paper`, `best` and `max` at 0.2 to 0.5 of the parameters removed.
- `tiny-llama-kl`: the same model by KL divergence, with the rows and sizes of `stories`.
- `encoder`: a sentence encoder. `best` and `max` at 0.5 of the parameters removed, and at 0.28 of the bytes.
- `rivals`: AutoRound on examples/tiny-llama, and `max` at its bytes.

Models are converted to float16 first. Every run is saved in OUT/refinement.json when it ends, and saved runs are not
repeated. In the end it prints the tables of all saved runs, and the requirements, and writes them to OUT/refinement.md.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.half_precision import copy_in_half_precision
from benchmarks.measured_runs import (
    Results,
    compressed,
    loss_figures,
    mean_and_spread,
    requirement,
    run,
    saved_runs,
    stored_fraction,
)
from benchmarks.quality import FACTORED
from benchmarks.rivals import GROUP_SIZE, SCHEMES, compare
from benchmarks.rivals import table as rivals_table
from rocket_core.config import BUILTIN_DATASET, HealingConfig
from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import ProfileCache, heal

HEALED = "best, healed"
"""Name of rows of `best` with healing after it."""
HEALING_TOKENS = 2_000_000
TINY_LLAMA = Path(__file__).parent.parent / "examples" / "tiny-llama"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A size to compress to.

    Attributes:
        name: how tables call it.
        settings: what asks for it.
        most: upper bounds on the loss, by the row that it is a bound of; see `Study.against`.
    """

    name: str
    settings: Mapping[str, Any]
    most: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Runs on one model.

    Attributes:
        title: of the table.
        rows: presets, and `HEALED`, in the order of the table.
        sizes: sizes to compress to.
        measure: what the losses are compared by: `kl`, `excess` or `drift`.
        against: row whose losses are the unit.
        length: tokens in a window.
        samples: calibration windows.
        windows: windows, or sentences, measured.
    """

    title: str
    rows: Sequence[str]
    sizes: Sequence[Size]
    measure: str
    against: str
    length: int = 256
    samples: int = 128
    windows: int = 96


def _removed(part: float, most: Mapping[str, float], **more: Any) -> Size:
    kinds = "factored, " if "kinds" in more else ""
    return Size(name=f"{kinds}{part:g} of the parameters", settings={"ratio": part, **more}, most=most)


def _bytes(part: float, most: Mapping[str, float]) -> Size:
    settings = {"ratio": round(1 - part, 6), "budget": "bytes"}
    return Size(name=f"{part:g} of the bytes", settings=settings, most=most)


_HEALABLE_SIZES = (
    _removed(0.3, {}, kinds=FACTORED),
    _removed(0.5, {"max": 0.6, HEALED: 0.4}, kinds=FACTORED),
    _bytes(0.2, {"max": 0.75}),
    _bytes(0.15, {"max": 0.75}),
)

STUDIES: Mapping[str, Study] = {
    "stories": Study(
        title="stories260K",
        rows=("best", "max", HEALED),
        sizes=_HEALABLE_SIZES,
        measure="kl",
        against="best",
    ),
    "tiny-llama": Study(
        title="examples/tiny-llama",
        rows=("paper", "best", "max"),
        sizes=[_removed(part, {"max": 0.1}) for part in (0.2, 0.3, 0.4, 0.5)],
        measure="excess",
        against="paper",
        # As many as `rocket compress` takes unless told otherwise; with half of them, most of the loss is theirs.
        samples=256,
    ),
    "tiny-llama-kl": Study(
        title="examples/tiny-llama, by KL divergence",
        rows=("best", "max", HEALED),
        sizes=_HEALABLE_SIZES,
        measure="kl",
        against="best",
        samples=256,
    ),
    "encoder": Study(
        title="MiniLM",
        rows=("best", "max"),
        sizes=[_removed(0.5, {"max": 1.0}), _bytes(0.28, {"max": 1.0})],
        measure="drift",
        against="best",
        length=128,
        windows=256,
    ),
}
RIVALS_PART = "rivals"
_RIVAL, _RIVAL_SCHEMES = "AutoRound", ("4", "3")
# Upper bound on the CPU time of `max`, as a part of that of `best`.
_MOST_TIME = 4.0
_UNITS = {"kl": "KL, nats per token", "excess": "excess perplexity", "drift": "drift"}


def row_name(row: str, size: Size) -> str:
    """Return the name of the runs of a row of tables at a size."""
    return f"{row}, {size.name}"


def table(study: Study, results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table of a study's runs."""
    measures = [study.measure, *(["excess"] if study.measure == "kl" else ["kl"] if study.measure == "excess" else [])]
    units = [_UNITS[measures[0]], f"of that of `{study.against}`", *(_UNITS[of] for of in measures[1:])]
    yield f"| | bytes of the linears | {' | '.join(units)} | CPU s |"
    yield "|---" * (len(units) + 3) + "|"
    for size in study.sizes:
        for row in study.rows:
            name = row_name(row, size)
            if name not in results.names:
                continue
            parts = results.parts(name, row_name(study.against, size), of=study.measure)
            cells = [mean_and_spread(results.values(name, of)) for of in ("fraction", *measures)]
            cells.insert(2, "" if row == study.against or not parts else mean_and_spread(parts))
            seconds = f"{statistics.mean(results.values(name, 'cpu_seconds')):.0f}"
            if row == HEALED:
                seconds += f" + {statistics.mean(results.values(name, 'healing_cpu_seconds')):.0f}"
            yield f"| {name} | {' | '.join(cells)} | {seconds} |"


def bars(study: Study, results: Results) -> Iterator[str]:
    """Yield the lines of a study's requirements: bound, measured mean, and whether it holds."""
    over: list[float] = []
    times: list[float] = []
    for size in study.sizes:
        for row, most in size.most.items():
            names = row_name(row, size), row_name(study.against, size)
            if parts := results.parts(*names, of=study.measure):
                what = f"{study.title}, {size.name}: {study.measure} of {row}, of that of {study.against}"
                yield requirement(what, parts, most)
        pair = row_name("max", size), row_name("best", size)
        times += results.parts(*pair, of="cpu_seconds")
        if "budget" in size.settings:
            asked = 1 - size.settings["ratio"]
            over += [found / asked - 1 for found in results.values(pair[0], "fraction")]
    if over:
        yield requirement(f"{study.title}: bytes of max, exceeded by a part of them", [max(over)], 0.0)
    if times:
        yield requirement(f"{study.title}: CPU time of max, of that of best, the largest", [max(times)], _MOST_TIME)


def healed_run(
    given: argparse.Namespace, model: Path, settings: Mapping[str, Any], seed: int, profiles: ProfileCache
) -> dict[str, Any]:
    """Compress, heal and measure once; the text of calibration is read until there are enough tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, healed = Path(scratch, "compressed"), Path(scratch, "healed")
        report, seconds = compressed(given, model, settings, seed, profiles, folder)
        config = HealingConfig(
            tokens=HEALING_TOKENS, dataset=str(given.calibrate), sequence_length=given.length, seed=seed
        )
        began = time.process_time()
        healing = heal(folder, healed, config, model=str(model), exports=("rocket",))
        taken = time.process_time() - began
        found = evaluate_text(
            healed / "rocket",
            Path(given.measure),
            sequence_length=given.length,
            limit=given.windows,
            against=model,
            device="cpu",
        )
        assert found.dense is not None
        assert found.difference is not None
        return {
            "seed": seed,
            "fraction": stored_fraction(healed / "rocket", model, report),
            **loss_figures(found.dense.perplexity, found.perplexity, found.difference),
            "cpu_seconds": seconds,
            "healing_cpu_seconds": taken,
            "healing_tokens": healing.tokens,
        }


def study_runs(
    study: Study, given: argparse.Namespace, folder: Path, saved: Callable[..., list[dict[str, Any]]]
) -> None:
    """Run what is missing of the runs asked for."""
    with tempfile.TemporaryDirectory() as scratch:
        model = copy_in_half_precision(folder, Path(scratch, folder.resolve().name))

        def measure(row: str, size: Size, seed: int) -> dict[str, Any]:
            """Compress and measure once; nothing is cached between runs, as their times are compared."""
            preset, measured = ("best", healed_run) if row == HEALED else (row, run)
            with tempfile.TemporaryDirectory() as profiles:
                settings = {"preset": preset, **size.settings}
                return measured(given, model, settings, seed, ProfileCache(Path(profiles)))

        saved(
            [
                (row_name(row, size), seed, functools.partial(measure, row, size, seed))
                for seed in range(given.seeds)
                for size in study.sizes
                for row in study.rows
                if row in given.rows and any(name in size.name for name in given.sizes)
            ]
        )


def rival_runs(given: argparse.Namespace, folder: Path, saved: Callable[..., list[dict[str, Any]]]) -> None:
    """Run what is missing of the rival's runs, and of those of `max` at its bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        model = copy_in_half_precision(folder, Path(scratch, folder.name))
        for scheme in _RIVAL_SCHEMES:
            compare(given, saved, model, _RIVAL, SCHEMES[scheme], ProfileCache(Path(scratch, "profiles")))


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of all tables of saved runs, each of which has the name of its `part`; requirements are last."""
    requirements = ["| | asked | found | |", "|---|---|---|---|"]
    for part, study in STUDIES.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            yield from (f"{study.title}:", "", *table(study, Results(own)), "")
            requirements += bars(study, Results(own))
    rivals = [row for row in rows if row["part"] == RIVALS_PART]
    if rivals:
        yield from (f"{_RIVAL}, examples/tiny-llama:", "", *rivals_table(rivals), "")
    yield from requirements


def main() -> None:
    """Run the missing combinations of the parts asked for, and write the tables of all saved runs."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "refinement.json"
    bundled = (TINY_LLAMA, BUILTIN_DATASET, TINY_LLAMA / "heldout.txt")
    texts = {
        "stories": (given.stories, given.calibrate, given.measure),
        "tiny-llama": bundled,
        "tiny-llama-kl": bundled,
        "encoder": (given.encoder, given.encoder_calibrate, given.encoder_measure),
        RIVALS_PART: bundled if given.environments is not None else (None, None, None),
    }
    for part in given.only:
        model, calibrate, measure = texts[part]
        if model is None:
            continue
        study = STUDIES.get(part, STUDIES["tiny-llama"])
        sizes = {"length": study.length, "samples": study.samples, "windows": study.windows}
        own = argparse.Namespace(**{**vars(given), "calibrate": calibrate, "measure": measure, **sizes})
        keys = {"part": part, "samples": study.samples, "windows": study.windows}
        saved = functools.partial(saved_runs, file, keys)
        if part == RIVALS_PART:
            rival_runs(own, model, saved)
        else:
            study_runs(study, own, model, saved)
    lines = [*report(json.loads(file.read_text()) if file.is_file() else [])]
    (given.out / "refinement.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stories", type=Path, help="folder of stories260K")
    parser.add_argument("--calibrate", help="TinyStories to calibrate on, a .jsonl file")
    parser.add_argument("--measure", help="other TinyStories, a .jsonl file")
    parser.add_argument("--encoder", type=Path, help="folder of an encoder")
    parser.add_argument("--encoder-calibrate", help="text file")
    parser.add_argument("--encoder-measure", help="text file")
    parser.add_argument("--environments", type=Path, help="folder for the rival's environment; see benchmarks.rivals")
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration draws")
    parts = [*STUDIES, RIVALS_PART]
    parser.add_argument("--only", choices=parts, nargs="+", default=parts, help="parts to run; all that can be")
    rows = list(dict.fromkeys(row for study in STUDIES.values() for row in study.rows))
    parser.add_argument("--rows", choices=rows, nargs="+", default=rows, help="rows of the tables to run")
    parser.add_argument("--sizes", nargs="+", default=[""], metavar="TEXT", help="sizes whose names contain a text")
    given = parser.parse_args()
    needed = {"stories": ("stories", "calibrate", "measure")}
    needed["encoder"] = ("encoder", "encoder_calibrate", "encoder_measure")
    for names in needed.values():
        values = [getattr(given, name) for name in names]
        if any(values) and not all(values):
            parser.error(f"--{', --'.join(names).replace('_', '-')} belong together")
        if values[0] is not None and not (values[0] / "config.json").is_file():
            parser.error(f"{values[0]} is not the folder of a model; name one that has config.json and safetensors")
    fixed = {"group_size": GROUP_SIZE, "preset": "max", "engine": "rocket"}
    return argparse.Namespace(**{**vars(given), **fixed})


if __name__ == "__main__":
    main()
