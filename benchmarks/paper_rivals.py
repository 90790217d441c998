"""The paper's other rivals at equal parameters: SliceGPT, LLM-Pruner and learned ranks.

    python -m benchmarks.paper_rivals --model FOLDER --calibrate FILE --measure FILE --out OUT --ratios 0.2 0.5

The rivals' programs are in `benchmarks/rival_programs`, written from their papers for this comparison; they are not
methods of Rocket. They compress a Llama in float32 with the windows that Rocket is calibrated on, and are measured on
the same windows as Rocket. It writes OUT/paper_rivals.json and OUT/paper_rivals.md: perplexity over dense, the part of
the parameters of the blocks' linear layers that is removed, less what the rival adds, and the processor seconds of the
compression. At a ratio of 0 nothing is removed, and the perplexity is the dense model's. Saved runs are not repeated.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measured_runs import mean_and_spread, saved_runs
from benchmarks.rival_programs import learned_ranks, llm_pruner, slicegpt
from benchmarks.rivals import calibration_windows
from rocket_core.calibration.chats import RowReader
from rocket_core.calibration.datasets import file_documents
from rocket_core.evaluation import evaluate_text, load_model, open_model, perplexity, read_text

RIVALS: Mapping[str, Callable[[Any, Tensor, float, int], float]] = {
    "SliceGPT": slicegpt.compress,
    "LLM-Pruner": llm_pruner.compress,
    "learned ranks": learned_ranks.compress,
}


def measured_windows(given: argparse.Namespace) -> Tensor:
    """Return the windows that Rocket's evaluation reads."""
    folder = open_model(given.model)
    texts = file_documents(given.measure, RowReader(tokenizer=folder.tokenizer))
    windows = read_text(folder, texts, count=given.windows, sequence_length=given.length).windows
    assert windows is not None
    return windows


def dense_perplexity(given: argparse.Namespace) -> dict[str, Any]:
    """Return the perplexity of the dense model as `rocket evaluate` measures it."""
    found = evaluate_text(
        given.model, given.measure, sequence_length=given.length, limit=given.windows, device="cpu"
    ).perplexity
    return {"perplexity": found}


def run(given: argparse.Namespace, rival: str, ratio: float, seed: int, dense: float) -> dict[str, Any]:
    """Compress with a rival and measure once; a ratio out of reach is a row as well."""
    windows = torch.tensor(calibration_windows(given, given.model, seed=seed))
    model = load_model(open_model(given.model), torch.device("cpu")).float()
    start = time.process_time()
    try:
        achieved = RIVALS[rival](model, windows, ratio, seed)
    except ValueError as error:
        return {"failure": str(error)}
    seconds = time.process_time() - start
    found = perplexity(model, measured_windows(given), batch_size=4).perplexity
    return {"perplexity": found, "quality": found / dense, "achieved": achieved, "cpu_seconds": seconds}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of means over seeds."""
    yield "| | ratio | perplexity over dense | removed | CPU s |"
    yield "|---|---|---|---|---|"
    for name, ratio in dict.fromkeys((row["name"], row["ratio"]) for row in rows):
        runs = [row for row in rows if (row["name"], row["ratio"]) == (name, ratio)]
        failures = [row["failure"] for row in runs if "failure" in row]
        if failures:
            yield f"| {name} | {ratio:g} | {failures[0]} | | |"
        else:
            removed, seconds = (statistics.mean(row[of] for row in runs) for of in ("achieved", "cpu_seconds"))
            quality = mean_and_spread([row["quality"] for row in runs])
            yield f"| {name} | {ratio:g} | {quality} | {removed:.4f} | {seconds:.0f} |"


def main() -> None:
    """Run the missing combinations, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Llama")
    parser.add_argument("--calibrate", required=True, help="as `rocket compress --calibration`")
    parser.add_argument("--measure", type=Path, required=True, help="a .txt or .jsonl file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.5])
    parser.add_argument("--rivals", choices=list(RIVALS), nargs="+", default=list(RIVALS))
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=48, help="windows measured")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of calibration windows and of what is drawn")
    given = parser.parse_args()
    for path in (given.model / "config.json", given.measure):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = {"samples": given.samples, "length": given.length, "windows": given.windows}
    file, keys = given.out / "paper_rivals.json", {"model": given.model.resolve().name, **sizes}
    dense = saved_runs(file, keys, [("dense", 0, lambda: dense_perplexity(given))])[0]["perplexity"]
    rows: list[dict[str, Any]] = []
    for rival, ratio in product(given.rivals, given.ratios):
        runs = [(rival, seed, functools.partial(run, given, rival, ratio, seed, dense)) for seed in given.seeds]
        rows += saved_runs(file, {**keys, "ratio": ratio}, runs)
    lines = list(table(rows))
    (given.out / "paper_rivals.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
