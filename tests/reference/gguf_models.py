"""Random models of the families that llama.cpp runs, with tokenizers of each kind, as folders of transformers."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEXT = Path("examples/tiny-llama/heldout.txt")
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
VOCABULARY = 600
SPECIAL = {
    "unknown": {"unk_token": "<unk>"},
    "ends": {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
}

_COMMON = {
    "vocab_size": VOCABULARY + 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + place / 16 for place in range(8)],
    "long_factor": [2.0 + place / 4 for place in range(8)],
    "original_max_position_embeddings": 128,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = 4
_CHOSEN = {"num_experts_per_tok": 2}
_QWEN = _CHOSEN | {"num_experts": EXPERTS, "moe_intermediate_size": 32}
MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, _CHOSEN | {"num_local_experts": EXPERTS, "sliding_window": None}),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        _QWEN | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _QWEN | {"head_dim": 32, "norm_topk_prob": True}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        _CHOSEN | {"num_local_experts": EXPERTS, "sliding_window": 16, "head_dim": 32, "rope_parameters": _YARN},
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, _CHOSEN | {"num_experts": EXPERTS, "num_key_value_heads": 4}),
}
"""Those of `MODELS` that are mixtures of experts."""

MODELS = MIXTURES | {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LINEAR, "head_dim": 32}),
    "yarn": (Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": _YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 32}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, _GEMMA),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA | {"num_hidden_layers": 7}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": None}),
    "longrope": (Phi3ForCausalLM, Phi3Config, {"sliding_window": None, "rope_parameters": _LONGROPE}),
}


def build(name, **changes):
    """Return a random model in float32, with norms and biases that matter."""
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(7)
    model = model_class(config_class(**(_COMMON | settings | changes))).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif key.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.copy_(torch.randn_like(parameter))
            elif "embed_tokens" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def _byte_level(cuts, *, normalizer=None, ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts is None)
    if cuts is None:
        tokenizer.pre_tokenizer = byte_level
    elif cuts == "digits":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        split = pre_tokenizers.Split(Regex(cuts), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(TEXT)], trainer)
    return tokenizer


def _sentence_piece(*, prefix):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, **SPECIAL["unknown"], fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    # Words are learned one by one, as SentencePiece does.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train([str(TEXT)], trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(content=" ", left=1)] if prefix else [])
    )
    return tokenizer


_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As in the tokenizer.json of a model of each kind.
TOKENIZERS = {
    "gpt-2": lambda: _byte_level(None),
    "smollm": lambda: _byte_level("digits"),
    "llama-bpe": lambda: _byte_level(rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}", ignore_merges=True),
    "smaug-bpe": lambda: _byte_level(rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"),
    "qwen2": lambda: _byte_level(rf"{_ENGLISH}|{_WORD}|\p{{N}}|{_TAIL}", normalizer=normalizers.NFC()),
    "tekken": lambda: _byte_level(_CASES % ("", "", r"\p{N}")),
    "gpt-4o": lambda: _byte_level(_CASES % (f"{_ENGLISH}?", f"{_ENGLISH}?", r"\p{N}{1,3}")),
    "prefixed": lambda: _sentence_piece(prefix=True),
    "unprefixed": lambda: _sentence_piece(prefix=False),
}


def save_tokenizer(kind, folder, *, begins=True):
    """Write a tokenizer that has a chat template and added tokens, one of them special."""
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens([AddedToken("<|call|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **SPECIAL["ends"])
    fast.save_pretrained(folder)
    return fast


def save(name, folder, *, tokenizer="prefixed", **changes):
    """Write a model with a tokenizer, and return both."""
    model = build(name, **changes)
    model.save_pretrained(folder)
    return model, save_tokenizer(tokenizer, folder)
