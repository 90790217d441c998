"""Training of `examples/tiny-llama` from scratch: `python examples/train_tiny_llama.py`.

The text is CPython's documentation, so no download is needed: its help topics and the docstrings of its standard
library, without the held-out topics on which the result is measured. This program writes everything in the folder,
including the figures of the model card. On two idle cores it takes about ten minutes.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocket_core.calibration.datasets import HELD_OUT_TOPICS, builtin_documents, documents, held_out_text, token_windows
from rocket_core.evaluation import perplexity

FOLDER = Path(__file__).parent / "tiny-llama"
BOUNDARY = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Hyperparameters, which determine the result together with the text.

    Attributes:
        seed: seed of initial weights, document order and window order.
        vocabulary: number of entries of the tokenizer.
        window: tokens per training sequence.
        batch: sequences per step.
        steps: optimizer steps.
        warmup: steps until the learning rate reaches its peak; it then falls along a cosine to a tenth of it.
        learning_rate: peak of the learning rate.
        weight_decay: weight decay of the matrices; that of norms is 0.
    """

    seed: int = 0
    vocabulary: int = 2048
    window: int = 256
    batch: int = 8
    steps: int = 2000
    warmup: int = 100
    learning_rate: float = 3e-3
    weight_decay: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of the model card."""

    parameters: int
    training_tokens: int
    held_out_tokens: int
    perplexity: float
    unigram_perplexity: float
    threads: int


def train_tokenizer(texts: list[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, with one token for both start and end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOUNDARY} $A",
        pair=f"{BOUNDARY} $A {BOUNDARY} $B",
        special_tokens=[(BOUNDARY, tokenizer.token_to_id(BOUNDARY))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOUNDARY,
        eos_token=BOUNDARY,
        pad_token=BOUNDARY,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under a class name that transformers 4 and software based on it support too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights from torch's global generator."""
    boundary = tokenizer.bos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=boundary,
        eos_token_id=boundary,
        pad_token_id=boundary,
    )
    return LlamaForCausalLM(config)


def batches(tokens: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield `recipe.steps` batches of windows that start anywhere in the tokens."""
    generator = torch.Generator().manual_seed(recipe.seed)
    offsets = torch.arange(recipe.window)
    for _ in range(recipe.steps):
        starts = torch.randint(len(tokens) - recipe.window + 1, (recipe.batch, 1), generator=generator)
        yield tokens[starts + offsets]


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Return the factor at a step, which rises linearly to 1 and then falls along a cosine to 0.1."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(model: LlamaForCausalLM, tokens: torch.Tensor, held_out: torch.Tensor, recipe: Recipe) -> None:
    """Train in place; the held-out windows are only monitored, and no setting is chosen by them."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe))
    started = time.monotonic()
    recent: list[float] = []
    model.train()
    for step, batch in enumerate(batches(tokens, recipe), start=1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if step % 50 == 0 or step == recipe.steps:
            training_perplexity = math.exp(sum(recent) / len(recent))
            line = f"step {step:5d}  {time.monotonic() - started:6.0f} s  training {training_perplexity:8.2f}"
            if step % 250 == 0:
                model.eval()
                line += f"  held-out {perplexity(model, held_out, batch_size=recipe.batch).perplexity:8.2f}"
                model.train()
            print(line, flush=True)
            recent.clear()


def unigram_perplexity(windows: torch.Tensor, tokens: torch.Tensor, *, vocabulary: int) -> float:
    """Return the perplexity of a unigram model: the counts of each token in the training text, plus one."""
    counts = torch.bincount(tokens, minlength=vocabulary).double() + 1
    return math.exp(-(counts / counts.sum()).log()[windows[:, 1:]].mean().item())


def model_card(figures: Figures, recipe: Recipe) -> str:
    """Return the model card, with the figures of the run that trained the weights."""
    trained_on = recipe.steps * recipe.batch * recipe.window
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, tiny]
---

# tiny-llama

A Llama with {figures.parameters:,} parameters that has read CPython's documentation. It exists so that Rocket can be
tried and tested without a download: small enough to be committed, trained well enough that compression has something
to lose.

| on the held-out text | perplexity |
|---|---|
| this model | {figures.perplexity:.2f} |
| unigram: the frequencies of the training tokens plus one | {figures.unigram_perplexity:.2f} |

Measured on `heldout.txt`, {figures.held_out_tokens:,} tokens in windows of {recipe.window}, with the stored weights
computed in float32.

## Architecture

`LlamaForCausalLM`: 6 layers, hidden size 192, 6 query heads sharing 2 key-value heads, SwiGLU of width 512, RMSNorm,
rotary positions up to 256, tied embeddings, weights in bfloat16. The tokenizer is a byte-level BPE of
{recipe.vocabulary} entries, trained on the same text; `{BOUNDARY}` opens and ends a document.

## Training

`python examples/train_tiny_llama.py` from the root of the repository writes everything in this folder.

| | |
|---|---|
| versions | CPython {platform.python_version()}, torch {torch.__version__.split("+")[0]} |
| seed | {recipe.seed} |
| training text | {figures.training_tokens:,} tokens, read {trained_on / figures.training_tokens:.1f} times |
| steps | {recipe.steps:,} of {recipe.batch} windows of {recipe.window} tokens |
| optimizer | AdamW, weight decay {recipe.weight_decay:g}, gradients clipped to norm 1 |
| learning rate | {recipe.learning_rate:g} after {recipe.warmup} steps of warm-up, then a cosine to a tenth of it |
| precision | float32 weights, bfloat16 autocast |
| machine | {figures.threads} CPU threads |

The text is what every CPython carries: the help topics of `pydoc_data` and the docstrings of the standard library.
Left out are the topics {", ".join(f"`{name}`" for name in HELD_OUT_TOPICS)}, which make `heldout.txt`, and
every paragraph elsewhere that repeats one of theirs. No setting was chosen by the held-out text. Another version of
CPython has slightly different text and gives slightly different weights; so does another processor.

## Limits

It continues text in the manner of Python's documentation and knows nothing else: no facts, no instructions, no code
that can be trusted. Use it to try tools, not to answer questions. What compression costs a model this small says
little about a large one.

## Licence

Weights, tokenizer and configuration: Apache-2.0. The training text and `heldout.txt` are documentation of Python,
copyright the Python Software Foundation, under the
[Python Software Foundation License Version 2](https://docs.python.org/3/license.html).
"""


def main() -> None:
    """Train, measure and write the folder."""
    parser = argparse.ArgumentParser(description="Train examples/tiny-llama on CPython's documentation.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(recipe.seed)
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heldout.txt").write_text(held_out_text(), encoding="utf-8")

    tokenizer = train_tokenizer(builtin_documents(), vocabulary=recipe.vocabulary)
    tokens = token_windows(documents("builtin", seed=recipe.seed), tokenizer, count=None, length=1).flatten()
    held_out = token_windows([held_out_text()], tokenizer, count=None, length=recipe.window)
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} training tokens, {held_out.numel():,} held out")
    print("step, seconds, perplexity")
    train(model, tokens, held_out, recipe)
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)

    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    figures = Figures(
        parameters=model.num_parameters(),
        training_tokens=len(tokens),
        held_out_tokens=held_out.numel(),
        perplexity=perplexity(stored, held_out, batch_size=recipe.batch).perplexity,
        unigram_perplexity=unigram_perplexity(held_out, tokens, vocabulary=len(tokenizer)),
        threads=arguments.threads,
    )
    (folder / "README.md").write_text(model_card(figures, recipe), encoding="utf-8")
    print(f"held-out perplexity {figures.perplexity:.2f}, of a unigram {figures.unigram_perplexity:.2f}")


if __name__ == "__main__":
    main()
