"""How far measured losses are from those that profiles predict.

    python -m benchmarks.predictions --model FOLDER --calibrate FILE --measure FILE --out FILE

For each target it prints the predicted increase of the loss in nats per token, the measured one (the logarithm of
perplexity over the original's), their ratio and the KL divergence, and writes OUT as JSON. One profile serves all
targets of a budget.
"""

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocket_core.config import compression_config
from rocket_core.pipeline import ProfileCache, compress


def run(
    given: argparse.Namespace, preset: str, weights: str, seed: int, target: Mapping[str, float], profiles: Path
) -> dict[str, Any]:
    """Compress and measure once."""
    config = compression_config(
        **target,
        preset=preset,
        token_weights=weights,
        export=("rocket",),
        calibration={
            "dataset": str(given.calibrate),
            "samples": given.samples,
            "sequence_length": given.length,
            "seed": seed,
        },
        evaluate={"dataset": str(given.measure), "samples": given.windows, "sequence_length": given.length},
    )
    with tempfile.TemporaryDirectory() as folder:
        report = compress(str(given.model), Path(folder), config, profiles=ProfileCache(profiles))
    evaluation = report.evaluation
    assert evaluation is not None
    before, after = evaluation.before.negative_log_likelihood, evaluation.after.negative_log_likelihood
    assert before is not None
    assert after is not None
    predicted, measured = report.allocation.total_error, after - before
    return {
        "preset": preset,
        "token_weights": weights,
        "seed": seed,
        **target,
        "predicted": predicted,
        "measured": measured,
        "perplexity_before": math.exp(before),
        "surprise": None if report.calibration.text is None else report.calibration.text.surprise,
        "kl_divergence": evaluation.difference.kl_divergence,
    }


def main() -> None:
    """Measure every preset and target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--measure", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--presets", nargs="+", default=("fast", "best"))
    parser.add_argument("--token-weights", nargs="+", default=("gradient",))
    parser.add_argument("--seeds", type=int, default=1, help="draws of calibration windows")
    parser.add_argument("--ratios", type=float, nargs="*", default=(0.2, 0.3, 0.4, 0.5))
    parser.add_argument("--bits", type=float, nargs="*", default=(8.0, 6.0, 5.0, 4.0, 3.0, 2.5))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    targets = [{"ratio": one} for one in given.ratios] + [{"bits": one} for one in given.bits]
    with tempfile.TemporaryDirectory() as profiles:
        for preset, weights, seed, target in itertools.product(
            given.presets, given.token_weights, range(given.seeds), targets
        ):
            row = run(given, preset, weights, seed, target, Path(profiles))
            rows.append(row)
            ratio = row["measured"] / row["predicted"] if row["predicted"] else math.nan
            print(
                f"{preset}, token weights {weights}, seed {seed}, {target}: predicted {row['predicted']:.5f}, measured "
                f"{row['measured']:.5f} ({ratio:.2f}), KL {row['kl_divergence']:.4f}",
                flush=True,
            )
            given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
