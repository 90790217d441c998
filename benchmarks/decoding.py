"""Speed and memory of quantized layers on one core: `python -m benchmarks.decoding`.

A model with random weights and the shapes of Llama-3.2-1B, but fewer blocks, decodes token by token (batch 1) and reads
a prompt. The variants take turns, so that a busy machine slows all equally; printed are medians of the ratios to dense
bfloat16 in the same round. Speed and memory are those of the blocks, which are compressed; the second column of speeds
is with the head, which is dense in all variants and has as many weights as four blocks.

A CPU without instructions for bfloat16 computes with it more slowly than its memory would allow, so dense float32 is
measured as well.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from rocket_core.hf import attach_factors
from rocket_core.layers import QuantizedLinear
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.sizes.code_format import CodeFormat
from rocket_core.system.devices import multiplies_bfloat16

WHOLE = 2**20
FORMATS = {
    "8 bits, a scale per output": CodeFormat(bits=8, group_size=WHOLE, scale_bits=16),
    "8 bits, groups of 64": CodeFormat(bits=8, group_size=64, scale_bits=16),
    "8 bits, groups of 16": CodeFormat(bits=8, group_size=16, scale_bits=6),
    "4 bits, a scale per output": CodeFormat(bits=4, group_size=WHOLE, scale_bits=16),
    "4 bits, groups of 64": CodeFormat(bits=4, group_size=64, scale_bits=16),
    "4 bits, groups of 32": CodeFormat(bits=4, group_size=32, scale_bits=8),
    "4 bits, groups of 16": CodeFormat(bits=4, group_size=16, scale_bits=6),
    "4 bits, groups of 8": CodeFormat(bits=4, group_size=8, scale_bits=6),
    "2 bits, groups of 16": CodeFormat(bits=2, group_size=16, scale_bits=6),
}
BASELINE = "dense bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured of a variant in one round.

    Attributes:
        blocks: seconds per decoded token in the blocks.
        head: seconds per decoded token in the head.
        prompt: seconds for the prompt in the blocks; None if it was not read in this round.
    """

    blocks: float
    head: float
    prompt: float | None


def dense_model(blocks: int, dtype: torch.dtype, vocabulary: int) -> LlamaForCausalLM:
    """Return a model with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=blocks,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def quantize(model: LlamaForCausalLM, code_format: CodeFormat) -> LlamaForCausalLM:
    """Replace the linear layers of the blocks with random codes, in the form they take when loaded on a CPU."""
    for name, module in list(model.model.layers.named_modules(prefix="model.layers")):
        if isinstance(module, torch.nn.Linear):
            d_in, d_out, half = module.in_features, module.out_features, 2 ** (code_format.bits - 1)
            codes = torch.randint(-half, half, (d_in, d_out), dtype=torch.int8)
            scales = torch.full((code_format.groups(d_in), d_out), 0.02 / half)
            rounded = RoundedWeight(codes=codes, scales=Scales.nearest(scales, 0, code_format))
            attach_factors(model, {name: rounded})
            model.get_submodule(name).prepare_()
    return model


def linear_bytes(model: LlamaForCausalLM) -> int:
    """Return the bytes in memory of the linear layers of the blocks."""
    layers = [module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    return sum(
        tensor.nbytes
        for layer in layers
        for tensor in (*layer._parameters.values(), *layer.buffers())
        if tensor is not None
    )


def measure(model: LlamaForCausalLM, tokens: int, prompt: int, clock: Callable[[], float]) -> Figures:
    """Decode some tokens, and read a prompt unless its length is zero."""
    cache, blocks, head = DynamicCache(config=model.config), 0.0, 0.0
    for token in range(tokens):
        start = clock()
        hidden = model.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).last_hidden_state
        middle = clock()
        model.lm_head(hidden)
        blocks, head = blocks + middle - start, head + clock() - middle
    if not prompt:
        return Figures(blocks=blocks / tokens, head=head / tokens, prompt=None)
    start = clock()
    model.model(torch.arange(prompt)[None], use_cache=False)
    return Figures(blocks=blocks / tokens, head=head / tokens, prompt=clock() - start)


def print_table(models: dict[str, LlamaForCausalLM], rounds: dict[str, list[Figures]]) -> None:
    """Print the instruction set that torch's kernels use, and medians in Markdown."""
    native = "" if multiplies_bfloat16() else "no "
    print(f"{torch.backends.cpu.get_cpu_capability()}, {native}instructions for bfloat16\n")
    base = rounds[BASELINE]
    print("| blocks | memory | speed | with the head | prompt | tokens per second |\n|---|---|---|---|---|---|")
    for name, figures in rounds.items():
        pairs = list(zip(base, figures, strict=True))
        memory = linear_bytes(models[name]) / linear_bytes(models[BASELINE])
        speed = median(one.blocks / other.blocks for one, other in pairs)
        whole = median((one.blocks + one.head) / (other.blocks + other.head) for one, other in pairs)
        prompt = median(one.prompt / other.prompt for one, other in pairs if one.prompt and other.prompt)
        tokens = 1 / median(one.blocks for one in figures)
        print(f"| {name} | {memory:.3f} | {speed:.2f} | {whole:.2f} | {prompt:.2f} | {tokens:.1f} |")


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=4, help="tokens to decode in each round")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt, read in every third round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--formats", choices=list(FORMATS), nargs="+", default=list(FORMATS), help="by default all")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure time on the CPU, which other processes change less"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {BASELINE: dense_model(options.blocks, torch.bfloat16, options.vocabulary)}
    models["dense float32"] = dense_model(options.blocks, torch.float32, options.vocabulary)
    for name in options.formats:
        models[name] = quantize(dense_model(options.blocks, torch.bfloat16, 8), FORMATS[name])
        models[name].model.embed_tokens = models[BASELINE].model.embed_tokens
        models[name].lm_head = models[BASELINE].lm_head
        assert all(layer.tabulated for layer in models[name].modules() if isinstance(layer, QuantizedLinear)), (
            "a layer is dense"
        )
    clock = time.process_time if options.cpu_time else time.perf_counter
    for model in models.values():
        measure(model, 1, options.prompt, clock)
    rounds: dict[str, list[Figures]] = {name: [] for name in models}
    for number in range(options.rounds):
        for name, model in models.items():
            rounds[name].append(measure(model, options.tokens, 0 if number % 3 else options.prompt, clock))
    print_table(models, rounds)


if __name__ == "__main__":
    main()
