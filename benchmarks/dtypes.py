"""`python -m benchmarks.dtypes`: one compression of the same model stored in float32, bfloat16 and float16, in turn.

Times are given as ratios to float32. A CPU runs float16 models in float32; the last line runs one in float16 itself.
"""

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rocket_core.config import compression_config
from rocket_core.pipeline import compress, context, preflight
from tests.reference.tiny_models import byte_tokenizer

HEADS = 4


def save_model(folder: Path, dtype: torch.dtype, *, hidden_size: int, blocks: int) -> None:
    """Write a model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def seconds_of(model: Path, output: Path, samples: int) -> float:
    """Return the time of one compression."""
    config = compression_config(ratio=0.3, device="cpu", calibration={"samples": samples, "sequence_length": 128})
    began = time.perf_counter()
    compress(str(model), output, config)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times: dict[str, float] = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            label = str(dtype).removeprefix("torch.")
            save_model(folder / label, dtype, hidden_size=options.hidden_size, blocks=options.blocks)
            times[label] = seconds_of(folder / label, folder / f"{label}-out", options.samples)
            print(f"{label:<26} {times[label]:6.1f} s, {times[label] / times['float32']:.2f} times", flush=True)
        with (
            mock.patch.object(context, "compute_dtype", lambda stored, _device: stored),
            mock.patch.object(preflight, "compute_dtype", lambda stored, _device: stored),
        ):
            seconds = seconds_of(folder / "float16", folder / "computed-out", options.samples)
        print(f"{'float16, computed in it':<26} {seconds:6.1f} s, {seconds / times['float32']:.2f} times", flush=True)


if __name__ == "__main__":
    main()
