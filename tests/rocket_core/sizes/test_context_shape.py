"""What a context takes, next to the bytes of the tensors in the caches that transformers fills."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.sizes.context_shape import KNOWN_FAMILIES, context_shape

TOKENS, BATCH = 40, 3
_PLAIN = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = _PLAIN | {"sliding_window": 8}
_EXPERTS = _PLAIN | {"num_experts": 4, "num_experts_per_tok": 2}
_LATENT = _PLAIN | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
_TOKEN_IDS = {name: _PLAIN[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
_STATE = _TOKEN_IDS | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "conv_kernel": 4}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
_BART = _TOKEN_IDS | {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "olmo", "olmo2", "phi", "stablelm", "cohere", "granite", "smollm3"), _PLAIN),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2"), _WINDOW),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    **dict.fromkeys(("t5", "mt5"), _T5 | {"decoder_start_token_id": 0}),
    **dict.fromkeys(("bart", "mbart"), _BART),
    "qwen2": _WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "gemma": _PLAIN | {"head_dim": 16},
    "gemma2": _WINDOW | {"head_dim": 16},
    "gemma3_text": _WINDOW | {"num_hidden_layers": 7},
    "gpt_oss": _WINDOW
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
    "gpt2": _TOKEN_IDS | {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt_neox": {name: value for name, value in _PLAIN.items() if name != "num_key_value_heads"},
    "opt": _TOKEN_IDS
    | {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32},
    "mamba": _STATE,
    "mamba2": _STATE | {"head_dim": 16, "num_heads": 4, "n_groups": 2, "chunk_size": 16},
    "jamba": _PLAIN
    | {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
    "qwen3_next": _EXPERTS
    | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
# How files that name no layer_types say which layers have a window.
_RULES = {"gemma3_text": {"sliding_window_pattern": 6}, "qwen3_next": {"full_attention_interval": 4}}


def _cached_bytes(value, seen):
    """Return the bytes of all matrices in a cache, each counted once."""
    if isinstance(value, torch.Tensor):
        if value.ndim < 2 or id(value) in seen:
            return 0
        seen[id(value)] = value
        return value.nbytes
    if hasattr(value, "__dict__"):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(_cached_bytes(part, seen) for part in parts)


def _kept_bytes(shape, itemsize):
    tokens = TOKENS * (shape.full_layers + shape.cross_layers) + min(TOKENS, shape.window - 1) * shape.window_layers
    state = shape.state_layers * (shape.state_numbers * itemsize + shape.state_bytes)
    return BATCH * (shape.token_numbers * itemsize * tokens + state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_it_counts_what_transformers_caches(family, dtype):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    ids = torch.randint(3, 60, (BATCH, TOKENS))
    kind, more = AutoModelForCausalLM, {}
    if config.is_encoder_decoder:
        kind, more = AutoModelForSeq2SeqLM, {"decoder_input_ids": ids}
    model = kind.from_config(config).to(dtype).eval()
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, **more)
    cache = out.cache_params if "cache_params" in out else out.past_key_values
    settings = json.loads(json.dumps(config.to_dict()))
    counted = _kept_bytes(context_shape(settings), dtype.itemsize)
    assert counted == _cached_bytes(cache, {}) > 0
    named = settings.pop("layer_types", None)
    assert context_shape(settings | _RULES.get(family, {})) == context_shape(settings | {"layer_types": named})


def test_every_known_family_is_compared():
    assert set(FAMILIES) == KNOWN_FAMILIES


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "qwen3_next"])
def test_usual_values_may_be_left_out(family):
    usual = json.loads(json.dumps(AutoConfig.for_model(family).to_dict()))
    short = usual | {"num_hidden_layers": 12, "layer_types": None}
    for name in ("head_dim", "sliding_window_pattern", "full_attention_interval"):
        short.pop(name, None)
    if family == "gemma3_text":
        for name in ("num_attention_heads", "num_key_value_heads", "sliding_window"):
            del short[name]
    full = AutoConfig.for_model(family, num_hidden_layers=12).to_dict()
    assert context_shape(short) == context_shape(full)


def test_a_decoder_in_a_model_of_images_is_found():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 1024, "hidden_size": 64}
    text["vocab_size"] = 512
    shape = context_shape({"model_type": "gemma3", "text_config": text})
    assert (shape.full_layers, shape.window_layers, shape.window, shape.token_numbers) == (1, 5, 1024, 2 * 4 * 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "a model of type rwkv needs for a context is not known; give the size"),
        ({"model_type": None}, "of type unknown needs"),
        ({"num_attention_heads": None}, "of type llama has no num_attention_heads or .*, on which"),
        ({"num_hidden_layers": "4"}, "has no .*num_hidden_layers"),
        ({"layer_types": ["full_attention", "chunked_attention", *["full_attention"] * 2]}, "a type of layer whose"),
        ({"layer_types": ["full_attention"]}, "not one for each layer"),
        ({"layer_types": [["full_attention"]] * 4}, "a type of layer whose"),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        context_shape(_PLAIN | {"model_type": "llama"} | changes)
