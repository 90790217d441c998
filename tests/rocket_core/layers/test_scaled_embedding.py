"""Embeddings that only scale are told from those that compute something else."""

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from rocket_core.layers.scaled_embedding import embedding_scale, rounds_scale, stock_embedding


class Shifted(GemmaTextScaledWordEmbedding):
    def forward(self, tokens):
        return super().forward(tokens) + 1


class OtherArguments(GemmaTextScaledWordEmbedding):
    def __init__(self, tokens, columns):
        super().__init__(tokens, columns, None, embed_scale=2.0)


@pytest.mark.parametrize("scaled_class", [GemmaTextScaledWordEmbedding, Gemma3TextScaledWordEmbedding])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_scale_of_gemma_is_found(scaled_class, device):
    with torch.device(device):
        assert embedding_scale(scaled_class(7, 4, 0, embed_scale=3.3)) == 3.3
        assert embedding_scale(nn.Embedding(7, 4)) == 1.0


@pytest.mark.parametrize(
    "embedding",
    [
        Shifted(7, 4, 0, embed_scale=3.3),
        OtherArguments(7, 4),
        nn.Embedding(7, 4, max_norm=1.0),
        nn.Linear(7, 4),
    ],
    ids=lambda embedding: type(embedding).__name__,
)
def test_others_have_no_scale(embedding):
    assert embedding_scale(embedding) is None


def test_the_scale_of_bart_is_found_and_not_rounded():
    # It multiplies by a Python number, whose product is rounded once instead of twice.
    assert embedding_scale(BartScaledWordEmbedding(7, 4, 0, embed_scale=3.3)) == 3.3
    assert rounds_scale(BartScaledWordEmbedding) is False
    assert rounds_scale(GemmaTextScaledWordEmbedding) is True
    assert rounds_scale(Shifted) is None


def test_a_stock_embedding_has_its_scale():
    made = stock_embedding(Gemma3TextScaledWordEmbedding, 4, 3.3)
    assert type(made) is Gemma3TextScaledWordEmbedding
    assert float(made.embed_scale) == pytest.approx(3.3)
    assert type(stock_embedding(nn.Embedding, 4, 1.0)) is nn.Embedding
