"""Training of a small mixture of experts: `python examples/train_tiny_mixture.py --output FOLDER`.

Text, tokenizer and recipe are those of `train_tiny_llama.py`; the weights are not kept with the sources. It shows how
experts are compressed without a download: `rocket compress FOLDER OUT --ratio 0.6 --evaluate FOLDER/heldout.txt`.
"""

import argparse
from pathlib import Path

import torch
from train_tiny_llama import Recipe, save_tokenizer, train, train_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from rocket_core.calibration.datasets import builtin_documents, documents, held_out_text, token_windows
from rocket_core.evaluation import perplexity


def new_model(tokenizer: PreTrainedTokenizerFast) -> MixtralForCausalLM:
    """Return a Mixtral with 4 blocks, 8 experts of which each token gets 2, and weights from torch's generator."""
    boundary = tokenizer.bos_token_id
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        # Adds the loss that keeps routers from always choosing the same experts.
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=boundary,
        eos_token_id=boundary,
        pad_token_id=boundary,
    )
    return MixtralForCausalLM(config)


def main() -> None:
    """Train, measure and write the folder."""
    parser = argparse.ArgumentParser(description="Train a small mixture of experts on CPython's documentation.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
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
    print("step, seconds, perplexity (that of training includes the balance of the experts)")
    train(model, tokens, held_out, recipe)
    model.config.output_router_logits = False
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    stored = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(f"held-out perplexity {perplexity(stored, held_out, batch_size=recipe.batch).perplexity:.2f}")


if __name__ == "__main__":
    main()
