"""Tiny masked language models, whose heads have a bias and are tied to the token embedding."""

import torch
from transformers import (
    AutoModelForMaskedLM,
    BertForMaskedLM,
    DistilBertForMaskedLM,
    PreTrainedModel,
    RobertaForMaskedLM,
)

from tests.reference.tiny_models import build_bert, build_distilbert, build_roberta

MASKED = ("bert", "roberta", "distilbert")

_BUILD = {
    "bert": (BertForMaskedLM, build_bert),
    "roberta": (RobertaForMaskedLM, build_roberta),
    "distilbert": (DistilBertForMaskedLM, build_distilbert),
}


def build_masked(family: str) -> PreTrainedModel:
    """Return a model with random weights and biases."""
    kind, build = _BUILD[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(build().config).eval()
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    return model


def load_masked(folder, **options):
    """Load a masked language model."""
    return AutoModelForMaskedLM.from_pretrained(folder, **options)
