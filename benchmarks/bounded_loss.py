"""Files for a bound on the measured loss next to the smallest that bisecting over sizes finds.

    python -m benchmarks.bounded_loss
    python -m benchmarks.bounded_loss --model MODEL --calibrate TEXT --max-kl 0.02 0.1 --seed 0 1 2

Each size of the bisection is a run with `target_bytes` from the same profile, measured on the same text. It ends when
the sizes that met and missed the bound are within 0.5 %.
"""

import argparse
import tempfile
from pathlib import Path

from rocket_core.config import BUILTIN_DATASET, CompressionConfig, compression_config
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.report.schema import CompressionReport

_EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-llama"
_CLOSE = 0.005


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(_EXAMPLE))
    parser.add_argument("--calibrate", default=BUILTIN_DATASET)
    parser.add_argument("--max-kl", type=float, nargs="+", default=[0.002, 0.01, 0.05])
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    asked = parser.parse_args(arguments)
    print("| max-kl | seed | rounds | measured | bytes | bisected | measured | of that |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in asked.seed:
        with tempfile.TemporaryDirectory() as folder:
            for bound in asked.max_kl:
                print(_row(asked, bound, seed, Path(folder)), flush=True)


def _row(asked: argparse.Namespace, bound: float, seed: int, folder: Path) -> str:
    found = _run(asked, seed, folder, max_kl=bound)
    written = found.exports[0].stored_bytes
    size, loss = _bisected(asked, bound, seed, folder, written)
    cells = (
        f"{bound:g}",
        f"{seed}",
        f"{len(found.rounds)}",
        f"{_loss(found):.4g}",
        f"{written:,}",
        f"{size:,}",
        f"{loss:.4g}",
        f"{written / size:.4f}",
    )
    return f"| {' | '.join(cells)} |"


def _bisected(asked: argparse.Namespace, bound: float, seed: int, folder: Path, found: int) -> tuple[int, float]:
    """Return the bytes and the loss of the smallest file within a bound, between half and twice the size found."""
    missed, met = found // 2, 2 * found
    loss = 0.0
    while met - missed > _CLOSE * met:
        middle = (missed + met) // 2
        try:
            report = _run(asked, seed, folder, target_bytes=middle)
        except InfeasibleBudgetError:
            # Too small for any choice of formats.
            missed = middle
            continue
        if _loss(report) <= bound:
            met, loss = min(middle, report.exports[0].stored_bytes), _loss(report)
        else:
            missed = middle
    return met, loss


def _loss(report: CompressionReport) -> float:
    assert report.evaluation is not None
    assert report.evaluation.difference.kl_divergence is not None
    return report.evaluation.difference.kl_divergence


def _run(asked: argparse.Namespace, seed: int, folder: Path, **target: float | int) -> CompressionReport:
    calibration = {"dataset": asked.calibrate, "samples": asked.samples, "sequence_length": asked.sequence_length}
    config: CompressionConfig = compression_config(
        preset=asked.preset,
        calibration=calibration | {"seed": seed},
        evaluate={"dataset": asked.calibrate},
        **target,
    )
    with tempfile.TemporaryDirectory(dir=folder) as output:
        return compress(asked.model, output, config, profiles=ProfileCache(folder / "profiles"))


if __name__ == "__main__":
    main()
