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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measured_runs import saved_runs
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


def run(given: argparse.Namespace, rival: str, ratio: float, dense: float) -> dict[str, Any]:
    """Compress with a rival and measure once; a ratio out of reach is a row as well."""
    windows = torch.tensor(calibration_windows(given, given.model, seed=given.seed))
    model = load_model(open_model(given.model), torch.device("cpu")).float()
    start = time.process_time()
    try:
        achieved = RIVALS[rival](model, windows, ratio, given.seed)
    except ValueError as error:
        return {"failure": str(error)}
    seconds = time.process_time() - start
    found = perplexity(model, measured_windows(given), batch_size=4).perplexity
    return {"perplexity": found, "quality": found / dense, "achieved": achieved, "cpu_seconds": seconds}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| | ratio | perplexity over dense | removed | CPU s |"
    yield "|---|---|---|---|---|"
    for row in rows:
        if "failure" in row:
            yield f"| {row['name']} | {row['ratio']:g} | {row['failure']} | | |"
        else:
            figures = f"{row['quality']:.4g} | {row['achieved']:.4f} | {row['cpu_seconds']:.0f}"
            yield f"| {row['name']} | {row['ratio']:g} | {figures} |"


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
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for path in (given.model / "config.json", given.measure):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = {"samples": given.samples, "length": given.length, "windows": given.windows}
    file, keys = given.out / "paper_rivals.json", {"model": given.model.resolve().name, **sizes}
    dense = saved_runs(file, keys, [("dense", given.seed, lambda: dense_perplexity(given))])[0]["perplexity"]
    rows: list[dict[str, Any]] = []
    for rival, ratio in product(given.rivals, given.ratios):
        measure = functools.partial(run, given, rival, ratio, dense)
        rows += saved_runs(file, {**keys, "ratio": ratio}, [(rival, given.seed, measure)])
    lines = list(table(rows))
    (given.out / "paper_rivals.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
