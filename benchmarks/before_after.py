"""The README's table of a model before and after compression: `python -m benchmarks.before_after`.

It has file size, memory of the loaded weights, tokens per second of greedy decoding (batch 1, one thread; the variants
take turns, so that a busy machine slows all equally), and perplexity on a text that was not used for calibration.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rocket_core.hf  # noqa: F401 - teaches transformers the compressed layers
from rocket_core import compress, compression_config
from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import ProfileCache

MODEL = "examples/tiny-llama"
TEXT = "examples/tiny-llama/heldout.txt"
ROUNDS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A model to measure.

    Attributes:
        name: name in the table.
        folder: folder with its files.
        is_packed: whether coefficients stay packed in memory.
    """

    name: str
    folder: Path
    is_packed: bool = False

    def load(self) -> torch.nn.Module:
        """Return the model, ready to generate."""
        config = AutoConfig.from_pretrained(self.folder)
        if self.is_packed:
            config.quantization_config["keep_packed"] = True
        return AutoModelForCausalLM.from_pretrained(self.folder, config=config).eval()

    def file_bytes(self) -> int:
        """Return the bytes of all safetensors."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))


def seconds_of(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> float:
    """Return the time to generate a number of tokens."""
    began = time.perf_counter()
    model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return time.perf_counter() - began


def main() -> None:
    """Compress to each size and at each ratio, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL, help="folder of a decoder")
    parser.add_argument("--text", type=Path, default=Path(TEXT), help="text to measure on")
    parser.add_argument("--calibration", default="builtin", help="as `rocket compress --calibration`")
    parser.add_argument("--sizes", type=int, nargs="*", default=(2_800_000, 1_500_000), help="bytes to fit into")
    parser.add_argument("--ratios", type=float, nargs="*", default=(0.2, 0.5), help="fractions of parameters to remove")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate in each round")
    parser.add_argument("--windows", type=int, help="windows of the text to measure on; all of them by default")
    parser.add_argument("--length", type=int, help="tokens of each; as many as the model attends to by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rocket-before-after-") as folder:
        variants = [Variant(name="original", folder=Path(arguments.model))]
        profiles = ProfileCache(Path(folder, "profiles"))
        sizes = {f"`--size {size / 1e6:g}MB`": {"target_bytes": size} for size in arguments.sizes}
        in_memory = {f"{name[:-1]} --storage memory`": target | {"storage": "memory"} for name, target in sizes.items()}
        ratios = {f"`--ratio {ratio}`": {"ratio": ratio} for ratio in arguments.ratios}
        targets: dict[str, dict[str, object]] = {**sizes, **in_memory, **ratios}
        for number, (name, target) in enumerate(targets.items()):
            out = Path(folder, str(number))
            calibration = {"dataset": arguments.calibration, "samples": 64, "sequence_length": 256}
            config = compression_config(**target, export=("rocket",), calibration=calibration)
            compress(arguments.model, out, config, profiles=profiles)
            variants.append(Variant(name=name, folder=out / "rocket"))
            # Layers of codes take little memory unless they are unpacked.
            if "ratio" in target:
                variants.append(Variant(name=f"{name}, packed in memory", folder=out / "rocket", is_packed=True))
        print_table(variants, arguments)


def print_table(variants: list[Variant], arguments: argparse.Namespace) -> None:
    """Measure the variants and print them in Markdown, the first as the reference."""
    models = [variant.load() for variant in variants]
    prompt = AutoTokenizer.from_pretrained(variants[0].folder)("The", return_tensors="pt")["input_ids"]
    rounds = [[seconds_of(model, prompt, arguments.tokens) for model in models] for _ in range(ROUNDS)]
    speeds = [median(one[0] / one[i] for one in rounds) for i in range(len(models))]
    print("| model | file | memory of the weights | speed | perplexity |\n|---|---|---|---|---|")
    for variant, model, speed in zip(variants, models, speeds, strict=True):
        perplexity = evaluate_text(
            variant.folder, arguments.text, limit=arguments.windows, sequence_length=arguments.length
        ).perplexity
        print(
            f"| {variant.name} | {variant.file_bytes() / 1e6:.2f} MB | {model.get_memory_footprint() / 1e6:.2f} MB"
            f" | {speed:.2f} | {perplexity:.2f} |"
        )


if __name__ == "__main__":
    main()
