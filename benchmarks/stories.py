"""Perplexity of a small real model after compression, for both objectives at ratios 0.2 to 0.5.

    python -m benchmarks.stories --model FOLDER --calibrate FILE --measure FILE

The model is calibrated on 128 windows of 256 tokens and measured on the first 96 windows of 256.
"""

import argparse
import json
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import rocket_core.hf  # noqa: F401  registers the format
from rocket_core.config import Objective, compression_config
from rocket_core.datasets import file_documents, token_windows
from rocket_core.evaluation import perplexity
from rocket_core.pipeline import compress

RATIOS = (0.2, 0.3, 0.4, 0.5)
OBJECTIVES: tuple[Objective, ...] = ("weight", "whitened")


def measure(folder: Path, text: Path) -> float:
    """Perplexity on the first 96 windows of 256 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = token_windows(file_documents(text), tokenizer, count=96, length=256)
    return perplexity(AutoModelForCausalLM.from_pretrained(folder), windows, batch_size=16).perplexity


def excess(model: Path, calibration: Path, text: Path, objective: Objective, ratio: float) -> tuple[float, float]:
    """Perplexity of the compressed model over that of the dense one, and the achieved ratio."""
    settings = {"dataset": str(calibration), "samples": 128, "sequence_length": 256}
    config = compression_config(ratio=ratio, objective=objective, calibration=settings, export=("factored",))
    with tempfile.TemporaryDirectory() as folder:
        report = compress(str(model), Path(folder), config)
        return measure(Path(folder) / "factored", text) / measure(model, text), report.totals.achieved_ratio


def main(model: Path, calibration: Path, text: Path) -> None:
    """Prints one JSON line per objective and ratio."""
    print(json.dumps({"dense_perplexity": measure(model, text)}), flush=True)
    for objective in OBJECTIVES:
        for ratio in RATIOS:
            over_dense, achieved = excess(model, calibration, text, objective, ratio)
            row = {"objective": objective, "ratio": ratio, "achieved": achieved, "perplexity_over_dense": over_dense}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "calibrate", "measure"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    main(arguments.model, arguments.calibrate, arguments.measure)
