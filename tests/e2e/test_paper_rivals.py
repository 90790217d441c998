"""The programs of the paper's rivals on a tiny Llama, and the table of `benchmarks.paper_rivals`."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.paper_rivals import RIVALS, table
from benchmarks.rival_programs import learned_ranks
from benchmarks.rival_programs.llama_blocks import linear_parameters
from benchmarks.rival_programs.slicegpt import kept_width


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=40, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for block in model.model.layers:
        torch.nn.init.uniform_(block.input_layernorm.weight, 0.5, 1.5)
        torch.nn.init.uniform_(block.post_attention_layernorm.weight, 0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def windows():
    return torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))


def compressed(llama, windows, rival, ratio):
    model = copy.deepcopy(llama)
    removed = RIVALS[rival](model, windows, ratio, 0)
    with torch.no_grad():
        return removed, model, model(input_ids=windows, use_cache=False).logits


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(learned_ranks, "_STEPS", 12)


@pytest.mark.parametrize("rival", RIVALS)
def test_with_nothing_removed_the_model_is_the_same(rival, llama, windows):
    removed, _, logits = compressed(llama, windows, rival, 0.0)
    assert removed <= 0
    with torch.no_grad():
        torch.testing.assert_close(logits, llama(input_ids=windows, use_cache=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.2, 0.5])
@pytest.mark.parametrize("rival", RIVALS)
def test_at_least_the_ratio_is_removed(rival, ratio, llama, windows):
    removed, _, logits = compressed(llama, windows, rival, ratio)
    assert ratio <= removed < ratio + 0.06
    assert logits.isfinite().all()


def test_pruned_weights_are_zero(llama, windows):
    removed, model, _ = compressed(llama, windows, "LLM-Pruner", 0.3)
    zeros = sum(int((weight == 0).sum()) for weight in model.model.layers.parameters())
    assert zeros == round(removed * linear_parameters(llama))


def test_the_widest_slice_has_its_shortcuts_within_the_budget():
    total, width, blocks = 10_000, 20, 3
    kept = kept_width(total, width, blocks, 0.3)
    sizes = [total * one / width + 2 * blocks * one**2 for one in (kept, kept + 1)]
    assert sizes[0] <= 7000 < sizes[1]


def test_the_table_has_means_over_seeds_and_why_a_rival_failed():
    row = {"name": "SliceGPT", "ratio": 0.5, "achieved": 0.50975, "cpu_seconds": 1.4}
    failed = {"name": "LLM-Pruner", "ratio": 0.9, "failure": "out of reach"}
    lines = list(table([row | {"quality": 28.0}, row | {"quality": 29.0}, failed]))
    assert lines[2:] == ["| SliceGPT | 0.5 | 28.5 ± 0.5 | 0.5098 | 1 |", "| LLM-Pruner | 0.9 | out of reach | | |"]
