"""Run a model with mlx-lm, with nothing of Rocket installed, and print what it answers as JSON.

    python run_mlx.py FOLDER PROMPT PROMPT DTYPE

DTYPE is what MLX computes in: `float32`, in which its own rounding is nothing, or `bfloat16`.
"""

import json
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_map

TOKENS = 12


def in_float32(array: mx.array) -> mx.array:
    """Return an array of bfloat16 in float32, and others as they are."""
    return array.astype(mx.float32) if array.dtype == mx.bfloat16 else array


def main() -> None:
    """Answer both prompts alone and as a batch."""
    folder, *prompts, dtype = sys.argv[1:]
    model, tokenizer = mlx_lm.load(folder)
    if dtype == "float32":
        model.update(tree_map(in_float32, model.parameters()))
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    logits = [np.array(model(mx.array([row])).astype(mx.float32))[0].tolist() for row in ids]
    greedy = [[one.token for one in mlx_lm.stream_generate(model, tokenizer, row, max_tokens=TOKENS)] for row in ids]
    batch = mlx_lm.batch_generate(model, tokenizer, ids, max_tokens=TOKENS, return_token_ids=True)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompts[0]}], add_generation_prompt=True)
    found = {"ids": ids, "logits": logits, "tokens": greedy, "batch": batch.token_ids, "chat": list(chat)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
