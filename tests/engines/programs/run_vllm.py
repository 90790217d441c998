"""Run a model with vLLM on a CPU, and print what it answers as JSON.

python run_vllm.py FOLDER LOAD_FORMAT PROMPT PROMPT
"""

import json
import sys

from vllm import LLM, SamplingParams

TOKENS = 12


def main() -> None:
    """Answer both prompts alone and as a batch."""
    folder, load_format, *prompts = sys.argv[1:]
    llm = LLM(model=folder, load_format=load_format, max_model_len=128, enforce_eager=True, seed=0)
    tokenizer = llm.get_tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    alone = [llm.generate([prompt], sampling)[0] for prompt in prompts]
    batch = llm.generate(prompts, sampling)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompts[0]}], add_generation_prompt=True)
    found = {
        "ids": [answer.prompt_token_ids for answer in alone],
        "tokens": [list(answer.outputs[0].token_ids) for answer in alone],
        "chances": [
            [place[token].logprob for place, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in (answer.outputs[0] for answer in alone)
        ],
        "batch": [list(answer.outputs[0].token_ids) for answer in batch],
        "chat": list(getattr(chat, "input_ids", chat)),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
