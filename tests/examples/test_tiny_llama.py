"""The bundled model, compared with its card."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocket_core.calibration.datasets import builtin_documents, file_documents, token_windows

FOLDER = Path(__file__).parents[2] / "examples" / "tiny-llama"
WINDOW = 256


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def held_out(tokenizer):
    return token_windows(file_documents(FOLDER / "heldout.txt"), tokenizer, count=None, length=WINDOW)


@pytest.fixture(scope="module")
def card() -> str:
    return (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def card_perplexities(card: str) -> dict[str, float]:
    return {
        name: float(re.search(rf"^\| {name}[^|]*\| ([\d.]+) \|$", card, re.MULTILINE).group(1))
        for name in ("this model", "unigram")
    }


@pytest.fixture(scope="module")
def perplexity(model, held_out) -> float:
    log_likelihoods = []
    with torch.inference_mode():
        for window in held_out:
            log_probabilities = model(window[None]).logits[0].double().log_softmax(-1)
            log_likelihoods.append(log_probabilities[:-1].gather(1, window[1:, None]))
    return torch.cat(log_likelihoods).mean().neg().exp().item()


def test_the_folder_is_at_most_eight_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 8_000_000


def test_the_folder_has_exactly_the_files_of_a_model_repository():
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "heldout.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_it_is_a_small_llama_with_the_relevant_features(model):
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_size"] >= 192
    assert config["num_hidden_layers"] >= 4
    assert 1 <= config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["hidden_act"] == "silu"
    assert config["tie_word_embeddings"]
    block = model.model.layers[0]
    assert block.mlp.gate_proj.weight.shape == block.mlp.up_proj.weight.shape
    assert block.self_attn.k_proj.weight.shape[0] < block.self_attn.q_proj.weight.shape[0]


def test_weights_are_stored_as_bfloat16():
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - no mapping


def test_the_tokenizer_is_lossless_and_adds_the_boundary_token(tokenizer):
    text = "def f(x):\n    return  'naïve ≠ 🚀'\t\0"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_it_generates_text(model, tokenizer):
    prompt = tokenizer("Return a new", return_tensors="pt")
    first, again = (model.generate(**prompt, max_new_tokens=12, do_sample=False) for _ in range(2))
    assert first.shape[1] > prompt["input_ids"].shape[1]
    assert first.equal(again)


def test_its_perplexity_is_the_one_on_the_card(perplexity, card_perplexities):
    assert perplexity == pytest.approx(card_perplexities["this model"], rel=2e-3)


def test_it_is_far_better_than_token_frequencies(perplexity, held_out, tokenizer, card_perplexities):
    frequencies = [1] * len(tokenizer)
    for text in builtin_documents():
        for token in [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]:
            frequencies[token] += 1
    total = sum(frequencies)
    surprisals = [math.log(total / frequencies[token]) for token in held_out[:, 1:].flatten().tolist()]
    unigram = math.exp(math.fsum(surprisals) / len(surprisals))
    # The running CPython's documentation differs a little from that of the one that trained the model.
    assert unigram == pytest.approx(card_perplexities["unigram"], rel=0.1)
    assert 5 * perplexity < unigram


def test_the_card_names_both_licences(card):
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "Python Software Foundation License Version 2" in card
