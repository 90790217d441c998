"""The model that `examples/train_k_llama.py` trains."""

import importlib
from pathlib import Path

import pytest
from torch import nn

from rocket_core.sizes.block_types import BLOCK_TYPES, block_types_for
from tests.reference.tiny_models import byte_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_k_llama").new_model(byte_tokenizer())


def test_every_type_of_llama_cpp_can_store_every_layer(model):
    tables = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    assert len(tables) == 4 * 7 + 2
    assert all(block_types_for(table.weight.shape[1]) == BLOCK_TYPES for table in tables)


def test_the_head_is_the_token_embedding(model):
    assert model.lm_head.weight is model.model.embed_tokens.weight
