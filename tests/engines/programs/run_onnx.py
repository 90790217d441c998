"""Run a model with ONNX Runtime GenAI on a CPU, with nothing of Rocket installed, and print what it answers as JSON.

    python run_onnx.py FOLDER FIRST PROMPT PROMPT

FIRST is the text of the token that begins a prompt, which its tokenizer does not add.
"""

import json
import sys

import numpy as np
import onnxruntime_genai as og

TOKENS = 12


def generator_of(model: og.Model, rows: np.ndarray) -> og.Generator:
    """Return a generator of tokens that has read prompts of one length."""
    length = rows.shape[1] + TOKENS
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(rows))
    generator = og.Generator(model, params)
    generator.append_tokens(rows)
    return generator


def answers(generator: og.Generator, count: int) -> list[list[int]]:
    """Return the most likely tokens after each prompt."""
    before = len(generator.get_sequence(0))
    for _ in range(TOKENS):
        generator.generate_next_token()
    return [np.array(generator.get_sequence(row))[before:].tolist() for row in range(count)]


def main() -> None:
    """Answer both prompts alone and as a batch."""
    folder, first, *prompts = sys.argv[1:]
    config = og.Config(folder)
    config.clear_providers()
    model = og.Model(config)
    tokenizer = og.Tokenizer(model)
    ids = [tokenizer.encode(first + prompt).tolist() for prompt in prompts]
    logits, greedy = [], []
    for row in ids:
        generator = generator_of(model, np.array([row], dtype=np.int32))
        logits.append(np.array(generator.get_output("logits"), dtype=np.float32)[0].tolist())
        greedy += answers(generator, 1)
    together = tokenizer.encode_batch([first + prompt for prompt in prompts]).as_numpy()
    batch = answers(generator_of(model, together.astype(np.int32)), len(prompts))
    message = [{"role": "user", "content": prompts[0]}]
    chat = tokenizer.encode(tokenizer.apply_chat_template(json.dumps(message), add_generation_prompt=True)).tolist()
    found = {"ids": ids, "logits": logits, "tokens": greedy, "batch": batch, "chat": chat}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
