"""`python -m benchmarks.quality`: quality of presets and methods on one model, at equal parameters or equal bytes.

    python -m benchmarks.quality --model FOLDER --calibrate FILE --measure FILE --out FOLDER

Writes OUT/quality.json with every run and OUT/quality.md with a table: for decoders perplexity over the dense model's,
for encoders the mean cosine drift of the pooled output; mean over seeds, with half the distance of largest and least.
Each run is kept as it ends, and a run that is there is not made again.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rocket_core.config import compression_config
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.pipeline import compress

FACTORED = ("low_rank", "factored", "shared")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"preset": "paper"},
    "fast": {"preset": "fast"},
    "best": {"preset": "best"},
    "best, factored only": {"preset": "best", "kinds": FACTORED},
    "svd-llm": {"method": "svd-llm"},
    "cospadi": {"method": "cospadi"},
    "rocket-uniform": {"method": "rocket-uniform", "kinds": ("low_rank", "factored")},
    "magnitude": {"method": "magnitude"},
    "wanda": {"method": "wanda"},
}


def run(given: argparse.Namespace, variant: str, ratio: float, budget: str, seed: int) -> dict[str, Any]:
    """Compresses and measures once."""
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
        evaluate={"dataset": str(given.measure), "samples": given.windows, "sequence_length": given.length},
        **VARIANTS[variant],
    )
    row = {"variant": variant, "ratio": ratio, "budget": budget, "seed": seed}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = compress(str(given.model), Path(folder), config)
        except InfeasibleBudgetError as error:
            return row | {"infeasible": str(error)}
    evaluation = report.evaluation
    assert evaluation is not None
    drift = evaluation.difference.cosine_drift
    before, after = evaluation.before.perplexity, evaluation.after.perplexity
    if drift is None:
        assert before is not None
        assert after is not None
        drift = after / before
    return row | {
        "quality": drift,
        "achieved": report.totals.achieved_ratio,
        "achieved_bytes": report.totals.achieved_byte_ratio,
        "cpu_seconds": time.process_time() - began,
    }


def table(rows: Sequence[Mapping[str, Any]], ratios: Sequence[float]) -> Iterator[str]:
    """The results as Markdown."""
    for budget in dict.fromkeys(row["budget"] for row in rows):
        yield f"\nAt equal {budget}:\n"
        yield f"| | {' | '.join(f'{ratio:g}' for ratio in ratios)} | CPU s |"
        yield "|---" * (len(ratios) + 2) + "|"
        for variant in dict.fromkeys(row["variant"] for row in rows):
            own = [row for row in rows if (row["variant"], row["budget"]) == (variant, budget)]
            cells = [_cell([row["quality"] for row in own if row["ratio"] == r and "quality" in row]) for r in ratios]
            seconds = [row["cpu_seconds"] for row in own if "cpu_seconds" in row]
            yield f"| {variant} | {' | '.join(cells)} | {statistics.median(seconds) if seconds else 0:.0f} |"


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "out of reach"
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.4g}" + (f" ± {spread:.2g}" if len(values) > 1 else "")


def main() -> None:
    """Runs what is not there yet, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "calibrate", "measure", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", choices=["parameters", "bytes"], nargs="+", default=["parameters", "bytes"])
    parser.add_argument("--variants", choices=list(VARIANTS), nargs="+", default=list(VARIANTS))
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=96, help="windows, or sentences, measured")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "quality.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    known = {(row["variant"], row["ratio"], row["budget"], row["seed"]) for row in rows}
    for combination in product(given.variants, given.ratios, given.budgets, given.seeds):
        if combination not in known:
            rows.append(run(given, *combination))
            print(json.dumps(rows[-1]), flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "quality.md").write_text("\n".join(table(rows, given.ratios)) + "\n")
    print((given.out / "quality.md").read_text())


if __name__ == "__main__":
    main()
