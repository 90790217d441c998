"""Quality of presets and methods on one model, at equal parameters or equal bytes.

    python -m benchmarks.quality --model FOLDER --calibrate FILE --measure FILE --out FOLDER

It writes OUT/quality.json with every run, OUT/quality.md with tables, and a plot for each budget: for decoders the
ratio of perplexity to the dense model's, for encoders the mean cosine drift of the pooled output; mean over seeds, with
half the difference between largest and smallest. Accuracy on local files of tasks has another table. Each run is saved
when it ends, and saved runs are not repeated.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot

from benchmarks.measured_runs import EvaluationClock
from rocket_core.config import compression_config
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.evaluation import load_model, load_tasks, open_model
from rocket_core.evaluation.harness import score_tasks
from rocket_core.pipeline import compress

FACTORED = ("low_rank", "factored", "shared")
WITHOUT_CODES = "best, without codes"
"""Name of runs of `best` that store numbers as wide as the model's; it equals `best` at equal parameters."""
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    f"paper, {setting} {value}": {"preset": "paper", setting: value}
    for setting, values in (
        ("metric", ("l1", "cosine", "spectral")),
        ("sparsification", ("per-row", "global")),
        ("importance_balance", (0.0,)),
    )
    for value in values
}
"""The paper's ablations: other error metrics, and other choices of the support of coefficients."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"preset": "paper"},
    **ABLATIONS,
    "fast": {"preset": "fast"},
    "best": {"preset": "best"},
    "max": {"preset": "max"},
    WITHOUT_CODES: {"preset": "best", "kinds": (*FACTORED, "sparse")},
    "best, factored only": {"preset": "best", "kinds": FACTORED},
    "svd-llm": {"method": "svd-llm"},
    "cospadi": {"method": "cospadi"},
    "rocket-uniform": {"method": "rocket-uniform", "kinds": ("low_rank", "factored")},
    "magnitude": {"method": "magnitude"},
    "wanda": {"method": "wanda"},
    "sparsegpt": {"method": "sparsegpt"},
}
_COMPARED = ("fast", "best", WITHOUT_CODES, "best, factored only")
BASELINES = ("svd-llm", "cospadi", "rocket-uniform", "magnitude", "wanda", "sparsegpt")

# Continuations of a task per call of the model.
_BATCH = 8

# Upper bounds on the excess over the dense model, at equal parameters, as a fraction of that of `paper`.
_MOST_EXCESS: Mapping[str, Mapping[float, float]] = {
    "best": dict.fromkeys((0.2, 0.3, 0.4, 0.5), 0.1),
    "best, factored only": dict.fromkeys((0.2, 0.3, 0.4, 0.5), 1 / 3),
}
_MOST_DRIFT: Mapping[float, float] = {0.3: 0.25, 0.5: 0.5}


def run(given: argparse.Namespace, variant: str, ratio: float, budget: str, seed: int) -> dict[str, Any]:
    """Compress and measure once."""
    config = compression_config(
        ratio=ratio,
        budget=budget,
        export=("factored",),
        calibration={
            "dataset": str(given.calibrate),
            "samples": given.samples,
            "sequence_length": given.length,
            "seed": seed,
        },
        evaluate={
            "dataset": str(given.measure),
            "samples": given.windows,
            "sequence_length": given.length,
        },
        **VARIANTS[variant],
    )
    row = {"variant": variant, "ratio": ratio, "budget": budget, "seed": seed}
    clock = EvaluationClock()
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = compress(str(given.model), Path(folder), config, observer=clock)
        except InfeasibleBudgetError as error:
            return row | {"infeasible": str(error)}
        accuracy = accuracies_of(given, Path(folder, "rocket"))
    evaluation = report.evaluation
    assert evaluation is not None
    drift = evaluation.difference.cosine_drift
    before, after = evaluation.before.perplexity, evaluation.after.perplexity
    if drift is None:
        assert before is not None
        assert after is not None
        quality = after / before
    else:
        quality = drift
    return row | {
        "measure": "perplexity over dense" if drift is None else "drift",
        "quality": quality,
        "achieved": report.totals.achieved_ratio,
        "achieved_bytes": report.totals.achieved_byte_ratio,
        "cpu_seconds": clock.seconds,
        "accuracy": accuracy,
    }


def accuracies_of(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the part of each task's items that a decoder answers rightly, by the name of its file."""
    if not given.tasks:
        return {}
    opened, tasks = open_model(folder), load_tasks([str(file) for file in given.tasks])
    model = load_model(opened, torch.device("cpu"))
    scores = score_tasks(model, opened.tokenizer, tasks, items=given.items, batch_size=_BATCH)
    return {Path(score.task).stem: score.value for score in scores if score.metric == "acc"}


class Results:
    """Runs, indexed by variant, budget and ratio.

    Args:
        rows: the results of `run`.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        found = {row["variant"] for row in rows}
        self.variants = [variant for variant in VARIANTS if variant in found]
        self.budgets = list(dict.fromkeys(row["budget"] for row in rows))
        self.ratios = sorted({row["ratio"] for row in rows})
        self.measure = next((row["measure"] for row in rows if "measure" in row), "")

    def values(self, variant: str, budget: str, ratio: float | None = None, *, of: str = "quality") -> list[float]:
        """Return a value for each seed, and for each ratio unless one is given; runs out of reach have no value."""
        return [
            row[of]
            for row in self._rows
            if (row["variant"], row["budget"]) == (variant, budget) and ratio in (None, row["ratio"]) and of in row
        ]

    def rows(self, variant: str, budget: str) -> list[Mapping[str, Any]]:
        """Return the runs whose budget is within reach."""
        return [row for row in self._rows if (row["variant"], row["budget"]) == (variant, budget) and "quality" in row]

    def excess(self, variant: str, budget: str, ratio: float) -> float | None:
        """Return the excess of the mean over the dense model."""
        values = self.values(variant, budget, ratio)
        return statistics.mean(values) - (0 if self.measure == "drift" else 1) if values else None

    def tried(self, budget: str) -> list[str]:
        """Return the variants that were run with a budget."""
        return [
            one for one in self.variants if any((one, budget) == (row["variant"], row["budget"]) for row in self._rows)
        ]

    def missing(self, variant: str, budget: str, ratio: float) -> str:
        """Return the text for a missing value."""
        sought = (variant, budget, ratio)
        tried = any((row["variant"], row["budget"], row["ratio"]) == sought for row in self._rows)
        return "out of reach" if tried else "not run"

    def seconds(self, variant: str, budget: str) -> float | None:
        """Return the median CPU time of a run."""
        values = self.values(variant, budget, of="cpu_seconds")
        return statistics.median(values) if values else None


def table(results: Results, budget: str) -> Iterator[str]:
    """Yield the lines of a Markdown table of the results."""
    yield f"\nAt equal {budget}, {results.measure}:\n"
    yield f"| | {' | '.join(f'{ratio:g}' for ratio in results.ratios)} | CPU s |"
    yield "|---" * (len(results.ratios) + 2) + "|"
    for variant in results.tried(budget):
        cells = [
            _cell(results.values(variant, budget, r)) or results.missing(variant, budget, r) for r in results.ratios
        ]
        seconds = results.seconds(variant, budget)
        yield f"| {variant} | {' | '.join(cells)} | {'' if seconds is None else round(seconds)} |"


def accuracies(results: Results, budget: str) -> Iterator[str]:
    """Yield the lines of a Markdown table of accuracies on tasks, if any were measured."""
    measured = [
        row for variant in results.tried(budget) for row in results.rows(variant, budget) if row.get("accuracy")
    ]
    if not measured:
        return
    dense = measured[0]["dense_accuracy"]
    columns = [(task, ratio) for task in dense for ratio in results.ratios]
    yield f"\nAccuracy at equal {budget}, in percent:\n"
    yield f"| | {' | '.join(f'{task}, {ratio:g}' for task, ratio in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    yield f"| dense | {' | '.join(f'{100 * dense[task]:.1f}' for task, _ in columns)} |"
    for variant in dict.fromkeys(row["variant"] for row in measured):
        found = [
            [100 * row["accuracy"][task] for row in measured if (row["variant"], row["ratio"]) == (variant, ratio)]
            for task, ratio in columns
        ]
        yield f"| {variant} | {' | '.join(f'{statistics.mean(values):.1f}' if values else '' for values in found)} |"


def comparison(results: Results, budget: str) -> Iterator[str]:
    """Yield the lines of a Markdown table of excesses relative to `paper` and to the best baseline."""
    yield f"\nExcess over the dense model, as a part of another's, at equal {budget}:\n"
    yield f"| | {' | '.join(f'{ratio:g}' for ratio in results.ratios)} | CPU time |"
    yield "|---" * (len(results.ratios) + 2) + "|"
    for variant in [name for name in _COMPARED if name in results.tried(budget)]:
        cells = [_part(results.excess(variant, budget, r), results.excess("paper", budget, r)) for r in results.ratios]
        cost = _part(results.seconds(variant, budget), results.seconds("paper", budget))
        yield f"| {variant}, of paper's | {' | '.join(cells)} | {cost} |"
    for variant in ("best", WITHOUT_CODES):
        cells = []
        for ratio in results.ratios:
            found = {name: results.excess(name, budget, ratio) for name in BASELINES}
            reached = {name: value for name, value in found.items() if value is not None}
            name = min(reached, key=reached.__getitem__, default="")
            part = _part(results.excess(variant, budget, ratio), reached.get(name))
            cells.append(part and f"{part} ({name})")
        if variant in results.tried(budget):
            yield f"| {variant}, of the best baseline's | {' | '.join(cells)} | |"


def bars(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table of requirements on `best`: bound, measured value, and whether it holds."""
    yield "\n| `best` | asked | found | |"
    yield "|---|---|---|---|"
    drift = results.measure == "drift"
    asked = {"best": _MOST_DRIFT} if drift else _MOST_EXCESS
    for variant, ratio in product(asked, results.ratios):
        own, papers = (results.excess(name, "parameters", ratio) for name in (variant, "paper"))
        most = asked[variant].get(ratio)
        if own is not None and papers and most is not None:
            yield _bar(f"{variant}: excess at {ratio:g}, of `paper`'s", own / papers, most)
    for variant, ratio in product(("best", WITHOUT_CODES), results.ratios):
        own = results.values(variant, "bytes", ratio)
        others = [(found, name) for name in BASELINES if (found := results.excess(name, "bytes", ratio)) is not None]
        if own and others:
            excess, name = min(others)
            least = min(own) - (0 if drift else 1)
            what = f"{variant}: excess at {ratio:g}, equal bytes, of the best baseline's ({name})"
            yield _bar(what, least / excess, 1)
    shortfalls = [
        (row[of] - row["ratio"]) / (1 - row["ratio"])
        for budget, of in (("parameters", "achieved"), ("bytes", "achieved_bytes"))
        for row in results.rows("best", budget)
    ]
    if shortfalls:
        yield _bar("budget exceeded, by a part of it", max(0.0, -min(shortfalls)), 1e-9)
        yield _bar("budget left over, of it", max(shortfalls), 0.002)
    own, papers = (results.seconds(name, "parameters") for name in ("best", "paper"))
    if own and papers:
        yield _bar("CPU time, of `paper`'s", own / papers, 4)


def _bar(what: str, found: float, most: float) -> str:
    return f"| {what} | at most {most:.3g} | {found:.3g} | {'holds' if found <= most else 'missed'} |"


def plot(results: Results, budget: str, file: Path) -> None:
    """Plot the excess over the ratio, with a line for each variant, and bars from the smallest to the largest seed."""
    mpl.rcParams.update({"svg.hashsalt": "rocket", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    dense = 0 if results.measure == "drift" else 1
    for variant in results.tried(budget):
        runs = {ratio: results.values(variant, budget, ratio) for ratio in results.ratios}
        ratios = [ratio for ratio, values in runs.items() if values]
        means = [statistics.mean(runs[ratio]) - dense for ratio in ratios]
        reach = [
            [mean + dense - min(runs[ratio]) for mean, ratio in zip(means, ratios, strict=True)],
            [max(runs[ratio]) - dense - mean for mean, ratio in zip(means, ratios, strict=True)],
        ]
        style = "--" if variant in BASELINES else "-"
        axes.errorbar(ratios, means, reach, label=variant, linestyle=style, marker=".", capsize=2)
    # Losses of nothing, or less, have no place on it.
    axes.set_yscale("log", nonpositive="mask")
    axes.set_xticks(results.ratios)
    axes.set_xlabel(f"compression ratio ({budget})")
    axes.set_ylabel(results.measure if dense == 0 else "perplexity over dense, less 1")
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.legend(loc="outside right center", frameon=False)
    # Without a date, so that equal runs draw equal files.
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _part(own: float | None, others: float | None) -> str:
    return "" if own is None or not others else f"{own / others:.3g}"


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.4g}" + (f" ± {spread:.2g}" if len(values) > 1 else "")


def main() -> None:
    """Run the missing combinations, and write the tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "calibrate", "measure", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", choices=["parameters", "bytes"], nargs="+", default=["parameters", "bytes"])
    usual = [name for name in VARIANTS if name not in ("max", *ABLATIONS)]
    parser.add_argument("--variants", choices=list(VARIANTS), nargs="+", default=usual)
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=96, help="windows, or sentences, measured")
    parser.add_argument("--tasks", type=Path, nargs="*", default=[], help=".jsonl files of tasks, for decoders")
    parser.add_argument("--items", type=int, help="items of each task; all without it")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "quality.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    dense = next((row["dense_accuracy"] for row in rows if row.get("dense_accuracy")), None)
    dense = dense or accuracies_of(given, given.model)
    known = {(row["variant"], row["ratio"], row["budget"], row["seed"]) for row in rows}
    for combination in product(given.variants, given.ratios, given.budgets, given.seeds):
        variant, _, budget, _ = combination
        if combination not in known and (variant, budget) != (WITHOUT_CODES, "parameters"):
            rows.append(run(given, *combination) | {"dense_accuracy": dense})
            print(json.dumps(rows[-1]), flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
    results = Results(rows)
    lines = [
        line for budget in results.budgets for part in (table, accuracies, comparison) for line in part(results, budget)
    ]
    lines += bars(results)
    for budget in results.budgets:
        plot(results, budget, given.out / f"{budget}.svg")
    (given.out / "quality.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
