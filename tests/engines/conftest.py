"""The bundled model with a chat template, compressed for an engine, and what our own reading of the files computes."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rocket_core.config import compression_config
from rocket_core.evaluation.models import load_model, open_model
from rocket_core.pipeline import compress

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
PROGRAMS = Path(__file__).parent / "programs"
PROMPTS = ("If the file does not exist, the module raises an error and", "The dict type")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Compress for an engine, and return the folder of the export."""

    @cache
    def make(engine, export, **target):
        model, out = (tmp_path_factory.mktemp(name) for name in ("model", "out"))
        shutil.copytree(MODEL, model, dirs_exist_ok=True)
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
        calibration = {"dataset": "builtin", "samples": 32, "sequence_length": 128}
        compress(str(model), out, compression_config(engine=engine, preset="fast", calibration=calibration, **target))
        return out / export

    return make


def answers_of(command, environment, folder=None):
    """Run a program in a folder, and return the JSON that it prints last."""
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def agree_on_prompts(folder, found):
    """Check that the tokenizer and the chat template are read as transformers reads them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found["ids"] == [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    chat = [{"role": "user", "content": PROMPTS[0]}]
    assert found["chat"] == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def own_model(folder):
    """Return the model that Rocket reads in an export."""
    return load_model(open_model(folder), torch.device("cpu"))


def log_chances(model, ids):
    """Return the logarithms of the probabilities of all tokens after each token."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)


def agree_on_tokens(model, prompt, tokens, tolerance):
    """Check that each token is the likeliest after those before it, or as likely but for the engine's rounding."""
    own = log_chances(model, prompt + tokens)[len(prompt) - 1 : -1]
    assert len(tokens) > 8
    assert bool((own.amax(dim=1) - own.gather(1, torch.tensor(tokens)[:, None])[:, 0] <= tolerance).all())
