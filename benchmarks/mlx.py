"""Rocket next to mlx-lm's own quantizers, in files for MLX of equal size.

    python -m benchmarks.mlx --model FOLDER --measure FILE --out FOLDER [--seeds 3]

The model is one in bfloat16. For each seed, which draws the calibration text, mlx-lm makes a folder by each recipe, and
Rocket compresses to the bytes of its safetensors. Recipes that read text get what Rocket is calibrated on, in place of
what mlx-lm downloads. All are measured in float32 from the weights that the files stand for, on text that no
calibration reads. It writes OUT/mlx.json with every run and OUT/mlx.md with the table; saved runs are not repeated.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_environments import python_of
from benchmarks.llama_cpp import calibration_text
from benchmarks.measured_runs import (
    Results,
    calibration,
    file_bytes,
    loss_figures,
    mean_and_spread,
    requirement,
    saved_runs,
)
from benchmarks.rivals import RivalFailedError, output_of
from rocket_core.config import compression_config
from rocket_core.errors import RocketError
from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import ProfileCache, compress

UNIFORM = {f"{bits} bits": ["convert", "-q", "--q-bits", str(bits)] for bits in (3, 4, 6, 8)}
MIXED = {
    name: ["convert", "-q", "--quant-predicate", name] for name in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
}
# mlx-lm's defaults but for the number of samples: 4 bits, dynamic quantization between 4 and 5.
CALIBRATED = {
    "dynamic": ["dynamic_quant"],
    "GPTQ": ["gptq", "--num-samples", "SAMPLES", "--sequence-length", "LENGTH"],
    "AWQ": ["awq", "--num-samples", "SAMPLES", "--sequence-length", "LENGTH"],
    "DWQ": ["dwq", "--data-path", "DATA", "--max-seq-length", "LENGTH", "--num-samples", "SAMPLES"],
}
RECIPES = UNIFORM | MIXED | CALIBRATED
# Samples that DWQ takes out of those that it is given, to judge what it learns.
DWQ_VALIDATION = 32
MOST_OF_UNIFORM, MOST_OF_RECIPE = 0.5, 0.8


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a folder for MLX."""
    found = evaluate_text(
        folder, given.measure, sequence_length=given.length, limit=given.windows, against=given.model, device="cpu"
    )
    assert found.dense is not None
    assert found.difference is not None
    return {"bytes": file_bytes(folder), **loss_figures(found.dense.perplexity, found.perplexity, found.difference)}


def run_recipe(given: argparse.Namespace, recipe: str, seed: int) -> dict[str, Any]:
    """Quantize with mlx-lm and measure; a failure is a row as well."""
    with tempfile.TemporaryDirectory() as scratch:
        home, data, out = (Path(scratch, name) for name in (".cache/mlx-lm", "data", "out"))
        for folder in (home, data):
            folder.mkdir(parents=True)
        text = calibration_text(given.model, given.calibrate, seed, given.samples * given.length)
        (home / "calibration_v5.txt").write_text(text, encoding="utf-8")
        size = len(text) // (given.samples + DWQ_VALIDATION)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        for name in ("train", "valid"):
            lines = [json.dumps({"text": piece}) for piece in pieces]
            (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        values = {"SAMPLES": str(given.samples), "LENGTH": str(given.length), "DATA": str(data)}
        program, *options = RECIPES[recipe]
        command = [str(python_of("mlx").with_name(f"mlx_lm.{program}")), "--model", str(given.model)]
        if program != "convert":
            options += ["--seed", str(seed)]
        try:
            output_of(
                ["env", f"HOME={scratch}", *command, "--mlx-path", str(out), *(values.get(one, one) for one in options)]
            )
            return measured(given, out)
        except (RivalFailedError, RocketError) as error:
            return {"failure": str(error)}


def run_rocket(given: argparse.Namespace, size: int, seed: int, profiles: ProfileCache) -> dict[str, Any]:
    """Compress to a size and measure."""
    config = compression_config(
        engine="mlx", preset=given.preset, target_bytes=size, calibration=calibration(given, seed)
    )
    with tempfile.TemporaryDirectory() as folder:
        compress(str(given.model), Path(folder), config, profiles=profiles)
        return measured(given, Path(folder, "mlx"))


def rocket_name(given: argparse.Namespace, recipe: str) -> str:
    """Return the name of Rocket's runs at the bytes of a recipe."""
    return f"rocket {given.preset}, bytes of {recipe}"


def table(given: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of Markdown tables: all runs, and whether the requirements hold."""
    results = Results([row for row in rows if "failure" not in row])
    failures = {row["name"]: row["failure"] for row in rows if "failure" in row}
    yield "| | bytes | KL, nats per token | of mlx-lm's |"
    yield "|---|---|---|---|"
    bars = []
    for recipe in given.recipes:
        theirs, ours = f"mlx-lm {recipe}", rocket_name(given, recipe)
        if theirs in failures:
            yield f"| {theirs} | does not run: {failures[theirs]} | | |"
            continue
        parts = results.parts(ours, theirs)
        for name, part in ((theirs, ""), (ours, mean_and_spread(parts))):
            size = max(results.values(name, "bytes"))
            yield f"| {name} | {size:,} | {mean_and_spread(results.values(name, 'kl'))} | {part} |"
        bars.append(requirement(ours, parts, MOST_OF_UNIFORM if recipe in UNIFORM else MOST_OF_RECIPE))
    yield from ("", "| | asked | found | |", "|---|---|---|---|", *bars)


def main() -> None:
    """Run the missing combinations, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder in bfloat16 that mlx-lm runs")
    parser.add_argument("--measure", type=Path, required=True, help="a .txt file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calibrate", default="builtin", help="as `rocket compress --calibration`")
    parser.add_argument("--recipes", choices=list(RECIPES), nargs="+", default=list(RECIPES))
    parser.add_argument("--preset", choices=("fast", "best"), default="best", help="preset of Rocket")
    parser.add_argument("--seeds", type=int, default=1, help="number of calibration draws")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=96, help="windows measured, fewer if the text ends")
    given = parser.parse_args()
    for path in (given.model / "config.json", given.measure):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    given.out.mkdir(parents=True, exist_ok=True)
    keys = {"model": given.model.resolve().name, "samples": given.samples, "windows": given.windows}
    rows: list[dict[str, Any]] = []

    def saved(name: str, seed: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        rows.extend(saved_runs(given.out / "mlx.json", keys, [(name, seed, measure)]))
        return rows[-1]

    with tempfile.TemporaryDirectory() as scratch:
        profiles = ProfileCache(Path(scratch))
        for seed in range(given.seeds):
            for recipe in given.recipes:
                theirs = saved(f"mlx-lm {recipe}", seed, lambda r=recipe, s=seed: run_recipe(given, r, s))
                if "failure" not in theirs:
                    size = theirs["bytes"]
                    name = rocket_name(given, recipe)
                    saved(name, seed, lambda n=size, s=seed: run_rocket(given, n, s, profiles))
    lines = list(table(given, rows))
    (given.out / "mlx.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
