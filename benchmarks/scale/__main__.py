"""Time, memory and disk of compressions at the sizes of real models, measured on a few blocks.

    python -m benchmarks.scale --model llama-3.2-1b [--model ...] --out FOLDER [--blocks 2] [--target ratio=0.5 ...]

It makes a model with the shapes of a real one (`shapes`), with random weights that have the properties of trained ones
(`weights`), compresses it in a separate process with one thread, and prints for each preset and target: processor
time by stage; operations of all matrix products, and their speed as a part of that of `torch.mm` for the same matrices;
peak memory and disk; and what follows for the blocks of the whole model, whose time is in proportion to their number.
Results are in OUT as JSON; saved ones are not repeated.

The vocabulary is small, so that embedding and head, which are left out of these figures, take little. A GPU is used if
there is one: time is then wall time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale.shapes import SIZES
from benchmarks.scale.table import Row, print_tables
from benchmarks.scale.weights import make_model

_TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny-llama"
_VOCABULARY = 2048
_WINDOW = 1024


def main() -> None:
    """Measure every model, preset and target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(SIZES), help="shapes; may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=_VOCABULARY, help="tokens of the embedding")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to calibrate on")
    parser.add_argument("--preset", action="append", help="may be repeated; fast by default")
    parser.add_argument("--target", action="append", help="ratio=0.5 or bits=4; may be repeated; both by default")
    parser.add_argument("--experts", type=int, help="experts of mixtures, each with its part of the tokens; all")
    parser.add_argument("--swap", action="store_true", help="run what needs more than the free memory; swap it out")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    rows = []
    for model in given.model or ["llama-3.2-1b"]:
        name, size = model, SIZES[model]
        if given.experts and "num_experts" in size.settings:
            name, size = f"{model}-{given.experts}-experts", size.with_experts(given.experts)
        folder = given.out / "models" / f"{name}-{given.blocks}-{given.vocabulary}"
        make_model(size, _TOKENIZER, folder, blocks=given.blocks, vocabulary=given.vocabulary)
        for preset in given.preset or ["fast"]:
            for target in given.target or ["ratio=0.5", "bits=4"]:
                file = given.out / f"{name}-{given.blocks}-{given.tokens}-{preset}-{target}.json"
                result = _measured(folder, preset, target, given.tokens, file, swap=given.swap)
                rows.append(
                    Row(
                        size=size,
                        blocks=given.blocks,
                        vocabulary=given.vocabulary,
                        preset=preset,
                        target=target,
                        result=result,
                    )
                )
                print(f"measured {size.name} {preset} {target}", file=sys.stderr, flush=True)
    text = print_tables(rows)
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n", encoding="utf-8")


def _measured(model: Path, preset: str, target: str, tokens: int, file: Path, *, swap: bool) -> dict[str, Any]:
    """Return what a compression took, and its operations: in a second run on an accelerator, which measuring slows."""
    if file.exists():
        saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return saved
    key, _, value = target.partition("=")
    settings = {
        "preset": preset,
        key: float(value),
        "calibration": {"samples": max(1, tokens // _WINDOW), "sequence_length": min(tokens, _WINDOW)},
    }
    more = ["--swap"] if swap else []
    if torch.accelerator.is_available():
        result = _child(model, settings, file, *more)
        result["operations"] = _child(model, settings, file, *more, "--operations")["operations"]
    else:
        result = _child(model, settings, file, *more, "--operations")
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _child(model: Path, settings: dict[str, Any], file: Path, *more: str) -> dict[str, Any]:
    output = file.with_suffix("")
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.scale.measure", "--model", str(model), "--out", str(output)]
    environment = os.environ | ({} if torch.accelerator.is_available() else {"OMP_NUM_THREADS": "1"})
    finished = subprocess.run(  # noqa: S603 - of this repository
        [*command, "--settings", json.dumps(settings), *more],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    shutil.rmtree(output, ignore_errors=True)
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


if __name__ == "__main__":
    main()
