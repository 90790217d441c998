"""Runs of benchmarks on one model: what they measure, how they are saved, and means over seeds."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rocket_core.config import compression_config
from rocket_core.engines import ENGINES
from rocket_core.pipeline import Observer, ProfileCache, Progress, compress
from rocket_core.report.quality import Difference
from rocket_core.report.schema import CompressionReport


class EvaluationClock(Observer):
    """Clock of the CPU seconds before the evaluation, which is not a cost of the method."""

    def __init__(self) -> None:
        self._began = time.process_time()
        self.seconds = 0.0

    def on_progress(self, progress: Progress) -> None:
        """Take the time of the first step of the evaluation."""
        if progress.stage == "evaluating" and not self.seconds:
            self.seconds = time.process_time() - self._began


def run(
    given: argparse.Namespace, model: Path, settings: Mapping[str, Any], seed: int, profiles: ProfileCache | None
) -> dict[str, Any]:
    """Compress and measure once; without a cache of profiles, the profile is made and timed as well."""
    with tempfile.TemporaryDirectory() as folder:
        report, seconds = compressed(given, model, settings, seed, profiles, Path(folder))
        evaluation = report.evaluation
        assert evaluation is not None
        export = Path(folder, evaluation.export)
        fraction, written = stored_fraction(export, model, report), file_bytes(export)
    return {
        "seed": seed,
        "fraction": fraction,
        "file_fraction": written / file_bytes(model),
        **loss_figures(evaluation.before.perplexity, evaluation.after.perplexity, evaluation.difference),
        "cpu_seconds": seconds,
    }


def compressed(
    given: argparse.Namespace,
    model: Path,
    settings: Mapping[str, Any],
    seed: int,
    profiles: ProfileCache | None,
    folder: Path,
) -> tuple[CompressionReport, float]:
    """Compress into an empty folder and measure; return the report, and the CPU seconds before the evaluation."""
    config = compression_config(
        export=ENGINES[settings.get("engine", "rocket")].exports[:1],
        calibration=calibration(given, seed),
        evaluate={"dataset": str(given.measure), "samples": given.windows, "sequence_length": given.length},
        **settings,
    )
    clock = EvaluationClock()
    report = compress(str(model), folder, config, observer=clock, profiles=profiles)
    return report, clock.seconds


def stored_fraction(artifact: Path, model: Path, report: CompressionReport) -> float:
    """Return the bytes of the linear layers of an artifact, as a part of those of 16 bits per weight."""
    # Tables, where they are decided about, are not linear layers of blocks.
    layers = [layer for layer in report.layers if layer.name in block_weights(model)]
    stored = stored_bytes(artifact, {layer.name for layer in layers})
    return stored / sum(2 * layer.d_in * layer.d_out for layer in layers)


def calibration(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the settings of a draw of calibration data."""
    return {
        "dataset": str(given.calibrate),
        "samples": given.samples,
        "sequence_length": given.length,
        "seed": seed,
    }


def file_bytes(folder: Path) -> int:
    """Return the bytes of all safetensors files in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


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


def block_weights(model: Path) -> dict[str, int]:
    """Return the parameters of each matrix in the blocks of a model, by the layer's name."""
    sizes = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                layer, _, last = name.rpartition(".")
                shape = tensors.get_slice(name).get_shape()
                in_block = any(part.isdigit() for part in layer.split("."))
                if last == "weight" and len(shape) == 2 and in_block:
                    sizes[layer] = shape[0] * shape[1]
    return sizes


def loss_figures(before: float | None, after: float | None, difference: Difference) -> dict[str, float | None]:
    """Return what a model lost: of an encoder its `drift`, else `excess` perplexity, `kl` and `agreement`."""
    if difference.cosine_drift is not None:
        return {"drift": difference.cosine_drift}
    assert before is not None
    assert after is not None
    return {"excess": after / before - 1, "kl": difference.kl_divergence, "agreement": difference.top1_agreement}


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
        return [row[of] for row in rows if of in row]

    def parts(self, name: str, others: str, of: str = "kl") -> list[float]:
        """Return the KL divergence, or another value, as a part of another's, for each seed that both have."""
        own, other = (
            {row["seed"]: row[of] for row in self._rows if row["name"] == one and of in row} for one in (name, others)
        )
        return [own[seed] / other[seed] for seed in sorted(own.keys() & other.keys()) if other[seed] > 0]


def requirement(what: str, found: Sequence[float], most: float) -> str:
    """Return the line of a requirement: bound, measured mean, and whether it holds."""
    holds = "holds" if statistics.mean(found) <= most else "missed"
    return f"| {what} | at most {most:.3g} | {mean_and_spread(found)} | {holds} |"


def mean_and_spread(values: Sequence[float]) -> str:
    """Return mean and half the distance from the smallest to the largest."""
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.4g}" + (f" ± {spread:.2g}" if len(values) > 1 else "")
