"""Training of a Llama whose layers fit llama.cpp's blocks of 256 inputs: `python examples/train_k_llama.py FOLDER`.

Like `examples/tiny-llama` in text, tokenizer and recipe, but with hidden size 256 and a feed-forward size of 768, so
that every type of llama.cpp can store every layer. The result is not committed: `benchmarks.llama_cpp` makes it when it
needs it. On one core it takes about half an hour.
"""

import argparse
from pathlib import Path

import torch
from train_tiny_llama import Recipe, save_tokenizer, train, train_tokenizer, unigram_perplexity
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocket_core.calibration.datasets import builtin_documents, documents, held_out_text, token_windows
from rocket_core.evaluation import perplexity


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights from torch's global generator."""
    boundary = tokenizer.bos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=boundary,
        eos_token_id=boundary,
        pad_token_id=boundary,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, measure and write the folder."""
    parser = argparse.ArgumentParser(description="Train a Llama with hidden size 256 on CPython's documentation.")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps, learning_rate=2e-3)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(recipe.seed)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heldout.txt").write_text(held_out_text(), encoding="utf-8")

    tokenizer = train_tokenizer(builtin_documents(), vocabulary=recipe.vocabulary)
    tokens = token_windows(documents("builtin", seed=recipe.seed), tokenizer, count=None, length=1).flatten()
    held_out = token_windows([held_out_text()], tokenizer, count=None, length=recipe.window)
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} training tokens, {held_out.numel():,} held out")
    train(model, tokens, held_out, recipe)
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reached = perplexity(stored, held_out, batch_size=recipe.batch).perplexity
    unigram = unigram_perplexity(held_out, tokens, vocabulary=len(tokenizer))
    print(f"held-out perplexity {reached:.2f}, of a unigram {unigram:.2f}")


if __name__ == "__main__":
    main()
