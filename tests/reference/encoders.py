"""A tiny encoder of text and its tokenizer, made on demand."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

_WORDS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "one", "two", "three", "four", "five", "six")
_POSITIONS = 64
_UNKNOWN = {"unk_token": "<unk>"}
_SPECIAL = {**_UNKNOWN, "pad_token": "<pad>", "mask_token": "<mask>"}


def build_bert(seed: int = 0) -> BertModel:
    """Return two blocks of 32 numbers, float32, in eval mode; other seeds give other weights."""
    config = BertConfig(
        vocab_size=len(_WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=_POSITIONS,
        initializer_range=0.3,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(config).eval()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per known word, between `<cls>` and `<sep>`."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, **_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>", special_tokens=[("<cls>", 2), ("<sep>", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=_POSITIONS, **_SPECIAL)


def save_bert(folder: Path, seed: int = 0) -> Path:
    """Write a complete checkpoint."""
    build_bert(seed).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
