"""Tiny encoder-decoders, most of which share one token table between encoder, decoder and head."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MT5Config,
    MT5ForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from tests.reference.tiny_models import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MAX_POSITIONS,
    MEL_BINS,
    VOCAB_SIZE,
    build_t5,
    build_whisper,
    byte_tokenizer,
)

TEXT = ("t5", "mt5", "bart", "marian")
"""Families whose encoder reads text."""

_BLOCKS = {
    "vocab_size": VOCAB_SIZE,
    "d_model": HIDDEN_SIZE,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": INTERMEDIATE_SIZE,
    "decoder_ffn_dim": INTERMEDIATE_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "scale_embedding": True,
    "init_std": 0.2,
}


def _bart() -> PreTrainedModel:
    """Return a model whose embeddings multiply by a constant, and whose logits get a bias."""
    model = BartForConditionalGeneration(BartConfig(**_BLOCKS))
    torch.nn.init.normal_(model.final_logits_bias)
    return model


def _mt5() -> PreTrainedModel:
    """Return a model whose head is not tied, which its checkpoint shows and its configuration does not."""
    model = MT5ForConditionalGeneration(MT5Config(**build_t5().config.to_dict()))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE, HIDDEN_SIZE) / HIDDEN_SIZE**0.5)
    del model.all_tied_weights_keys["lm_head.weight"]
    return model


def _t5gemma() -> PreTrainedModel:
    """Return a model whose configuration names no token that its decoder starts with."""
    side = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=side, decoder=side, vocab_size=VOCAB_SIZE))


def _switch() -> PreTrainedModel:
    """Return a model whose experts are a list of modules that is called."""
    shapes = build_t5().config.to_dict() | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = SwitchTransformersConfig(**shapes, num_experts=4, expert_capacity=64)
    return SwitchTransformersForConditionalGeneration(config)


def _nllb_moe() -> PreTrainedModel:
    """Return a model with a list of experts in every second block."""
    sparse = {"num_experts": 2, "expert_capacity": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**_BLOCKS, **sparse))


_BUILD = {
    "t5": build_t5,
    "mt5": _mt5,
    "bart": _bart,
    "marian": lambda: MarianMTModel(MarianConfig(**_BLOCKS)),
    "whisper": build_whisper,
    "t5gemma": _t5gemma,
    "switch": _switch,
    "nllb-moe": _nllb_moe,
}


def build_sequence_model(family: str) -> PreTrainedModel:
    """Return a model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _BUILD[family]().eval()


def save_sequence_model(family: str, folder: Path) -> Path:
    """Write a complete checkpoint of a family whose encoder reads text."""
    build_sequence_model(family).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load_sequence_model(folder, **options):
    """Load a model of any of the families."""
    kind = AutoModelForSpeechSeq2Seq if "whisper" in folder.parts else AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder, **options)


def inputs_of(family):
    """Return arguments of a model, but for those of its decoder."""
    generator = torch.Generator().manual_seed(1)
    if family == "whisper":
        return {"input_features": torch.randn(2, MEL_BINS, 100, generator=generator)}
    return {"input_ids": torch.randint(3, 259, (2, 24), generator=generator)}


def sequence_logits(model, family):
    """Return the logits of a model for its inputs."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        ids = torch.randint(3, 259, (2, 20), generator=generator)
        return model(**inputs_of(family), decoder_input_ids=ids).logits.float()


def sequence_batch():
    """Return arguments of a model whose encoder reads text."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(3, 259, (4, 20), generator=generator) for name in ("input_ids", "decoder_input_ids")}
