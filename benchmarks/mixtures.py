"""A mixture of experts at several sizes: `python -m benchmarks.mixtures MODEL --out OUT`.

The model is one that `examples/train_tiny_mixture.py` trains, with its held-out text next to it, or any other mixture
with a text given by `--text`. Each row is one run, with the preset `fast` where no other is named; below the table are
the fraction of the bytes that experts take, and what the original and the model of half its bytes write.
"""

import argparse
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import rocket_core.hf  # noqa: F401 - teaches transformers the compressed layers
from rocket_core.config import compression_config
from rocket_core.pipeline import compress
from rocket_core.report.schema import CompressionReport

# Fractions of the model's bytes that its files are asked to take.
_SIZES = (0.75, 0.5, 0.25)
_RATIOS = (0.3, 0.5)
_HALF = 0.5
_PROMPT = "The dict type"
_NEW_TOKENS = 24


def _cases(dense_bytes: int) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield a name for files, one for people, and the target of each run."""
    for size in _SIZES:
        yield f"size-{size}", f"{size:.0%} of the bytes", {"target_bytes": int(size * dense_bytes)}
    yield "size-best", f"{min(_SIZES):.0%}, best", {"target_bytes": int(min(_SIZES) * dense_bytes), "preset": "best"}
    for ratio in _RATIOS:
        yield f"ratio-{ratio}", f"`--ratio {ratio}`", {"ratio": ratio}
        yield f"ratio-{ratio}-best", f"`--ratio {ratio}`, best", {"ratio": ratio, "preset": "best"}
    yield "dense-experts", "`--ratio 0.3 --ignore '*.experts.*'`", {"ratio": 0.3, "ignore": ["*.experts.*"]}


def _row(name: str, report: CompressionReport) -> str:
    evaluation = report.evaluation
    assert evaluation is not None, "every run is evaluated"
    removed = 1 - report.totals.stored_bytes / report.totals.dense_bytes
    before, after = evaluation.before.perplexity, evaluation.after.perplexity
    divergence = evaluation.difference.kl_divergence
    assert divergence is not None, "a mixture predicts tokens"
    return f"| {name} | {removed:.1%} | {before:.2f} | {after:.2f} | {divergence:.4f} |"


def _fraction_in_experts(model: Path) -> float:
    """Return the fraction of the bytes of a checkpoint that is in weights of experts."""
    total = experts = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                size = tensors.get_tensor(name).nbytes
                total += size
                experts += size if ".experts." in name else 0
    return experts / total


def _written_by(model: Path, tokenizer: Path) -> str:
    reader = AutoTokenizer.from_pretrained(tokenizer)
    inputs = reader(_PROMPT, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokens = loaded.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
    written: str = reader.decode(tokens[0], skip_special_tokens=True)
    return written


def main() -> None:
    """Compress the model at every size, and print the table."""
    parser = argparse.ArgumentParser(description="Measure a mixture of experts at several sizes.")
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; emptied first")
    parser.add_argument("--text", type=Path, help="held-out text (default: heldout.txt in the model's folder)")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens per window (default: the model's)")
    arguments = parser.parse_args()
    model: Path = arguments.model
    text = arguments.text or model / "heldout.txt"
    shutil.rmtree(arguments.out, ignore_errors=True)
    dense_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    print("| target | bytes removed | perplexity before | after | KL, nats per token |\n|---|---|---|---|---|")
    for name, title, target in _cases(dense_bytes):
        config = compression_config(
            export=("rocket",),
            calibration={"samples": arguments.samples, "sequence_length": arguments.length},
            evaluate={"dataset": str(text), "sequence_length": arguments.length},
            **{"preset": "fast", **target},
        )
        print(_row(title, compress(str(model), arguments.out / name, config)), flush=True)
    print(f"\nexperts: {_fraction_in_experts(model):.1%} of the bytes")
    half = arguments.out / f"size-{_HALF}" / "rocket"
    for title, folder in (("original", model), (f"{_HALF:.0%} of the bytes", half)):
        print(f"\n{title}: {_written_by(folder, model)!r}")


if __name__ == "__main__":
    main()
