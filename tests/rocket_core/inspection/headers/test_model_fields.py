"""Fields of config.json compared with the weights: real models pass, and hostile fields are refused by name."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.inspection.checks.preconditions import check_config, parse_config
from rocket_core.inspection.files.safetensors_headers import local_weight_files, parse_header, read_header
from rocket_core.inspection.headers.model_fields import check_fields, check_sizes, find_number, longer_side
from rocket_core.inspection.headers.weight_summary import WeightSummary, summarize, summarize_files
from tests.reference.hostile_files import HUGE, LLAMA
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

TINY = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAIR = {
    **{key: value for key, value in TINY.items() if key.endswith("_id") or key == "vocab_size"},
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
# Towers, pairs, experts, embeddings narrower than the blocks, and fields that say nothing about the weights.
REAL = {
    "bart": PAIR,
    "mbart": PAIR,
    "bert": TINY,
    "biogpt": TINY,
    "deberta-v2": TINY,
    "electra": TINY | {"embedding_size": 8},
    "gemma3_text": TINY | {"head_dim": 8, "sliding_window": 131072},
    "gemma3": {"text_config": TINY | {"head_dim": 8}, "vision_config": TOWER, "mm_tokens_per_image": 4},
    "llama": TINY | {"tie_word_embeddings": True, "max_position_embeddings": 10_485_760},
    "llava": {
        "text_config": TINY | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
        "vision_feature_layer": -2,
    },
    "mistral": TINY | {"sliding_window": 4096},
    "modernbert": TINY,
    "mpnet": TINY,
    "opt": TINY | {"ffn_dim": 80, "word_embed_proj_dim": 16},
    "qwen2": TINY | {"max_window_layers": 28, "rope_theta": 5_000_000},
    "qwen3_moe": TINY | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "intermediate_size": 6144},
    "xglm": {"vocab_size": 320, "d_model": 32, "ffn_dim": 80, "num_layers": 2, "attention_heads": 4},
    "xlm-roberta": TINY,
}


def weights_of(folder):
    return summarize_files(read_header(file, file.name) for file in local_weight_files(folder, "m"))


@pytest.fixture(scope="module")
def llama():
    raw = safetensors_bytes(llama_tensors())
    length = int.from_bytes(raw[:8], "little")
    return summarize(parse_header(raw[8 : 8 + length], len(raw), "f"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REAL)
def test_a_real_model_agrees_with_its_config(family, tmp_path):
    config = AutoConfig.for_model(family, **REAL[family])
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    stored, weights = parse_config((tmp_path / "config.json").read_bytes(), "m"), weights_of(tmp_path)
    whole = json.loads(config.to_json_string(use_diff=False))
    for fields in (stored, whole):
        check_config(fields, "m")
        check_sizes(fields, weights, "m")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_no_default_field_of_a_family_is_refused():
    made = 0
    for name in CONFIG_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(name)
        except Exception:  # noqa: BLE001, S112 - a few need arguments, and each refuses in its own way
            continue
        check_fields(json.loads(config.to_json_string(use_diff=False)), "m")
        made += 1
    assert made > 0.95 * len(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers above 2, but the weights hold 2 blocks at most"),
        ({"n_layer": HUGE}, "n_layer above 2"),
        ({"hidden_size": 321}, "hidden_size above 320, but the weights hold no dimension above 320"),
        ({"vocab_size": 321}, "vocab_size above 320"),
        ({"hidden_size": 33}, "vocab_size and hidden size for 10560 embeddings, but the largest tensor holds 10240"),
        ({"num_attention_heads": HUGE}, "num_attention_heads above 4096"),
        ({"num_labels": HUGE}, "num_labels above 131072"),
        ({"intermediate_size": HUGE}, "intermediate_size above"),
        ({"vision_config": {"depth": HUGE}}, "vision_config.depth above 264"),
        ({"parts": [{"deeper_config": {"num_experts": HUGE}}]}, "deeper_config.num_experts above 4096"),
        ({"attention_types": [[["global"], HUGE]]}, "attention_types above 264"),
        ({"model_type": "bert", "max_position_embeddings": 512}, "max_position_embeddings above 320"),
        ({"model_type": "of_a_newer_transformers", "num_hidden_layers": 265}, "num_hidden_layers above 264"),
        ({"model_type": "of_a_newer_transformers", "vocab_size": HUGE}, "vocab_size above"),
    ],
)
def test_sizes_beyond_the_weights_are_refused_by_name(fields, named, llama):
    check_sizes(LLAMA, llama, "m")
    with pytest.raises(UnsupportedArchitectureError) as caught:
        check_sizes(LLAMA | fields, llama, "m")
    assert str(caught.value).startswith("the config.json of m has ")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 1},
        {"model_type": "of_a_newer_transformers", "num_hidden_layers": 264},
        {"max_position_embeddings": 10_485_760},
        {"rope_theta": 10**12, "seed": 2**62, "bos_token_id": HUGE},
        {"label2id": {"num_layers": HUGE, "num_experts": HUGE}},
        {"a" * 100 + "_layers": HUGE},
        {"_attn_implementation": {"text_config": "sdpa"}},
    ],
)
def test_unusual_but_valid_fields_are_accepted(fields, llama):
    check_fields(LLAMA | fields, "m")
    check_sizes(LLAMA | fields, llama, "m")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sliding_window": "x"}, "sliding_window that is not a number of tokens"),
        ({"text_config": {"attention_chunk_size": 1.5}}, "text_config.attention_chunk_size that is not a number of"),
        ({"is_causal": 1}, "is_causal that is neither true nor false"),
        ({"kv_sharing_modes": []}, "kv_sharing_modes that is no setting"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id that is neither the number of a token nor a list of them"),
        ({"num_labels": 2**70}, "num_labels that is out of range"),
    ],
)
def test_fields_of_any_family_have_their_type(fields, named):
    check_fields({"sliding_window": 0, "use_sliding_window": False}, "m")
    check_fields({"sliding_window": 8, "is_causal": None, "pad_token_id": -1, "eos_token_id": [1, 2]}, "m")
    with pytest.raises(UnsupportedArchitectureError) as caught:
        check_fields(LLAMA | fields, "m")
    assert named in str(caught.value)


def test_empty_tensors_do_not_justify_a_dimension():
    weights = WeightSummary(dtype_bytes={"F32": 4}, block_shapes={}, tensors=2, largest_dimension=1, largest_tensor=1)
    with pytest.raises(UnsupportedArchitectureError, match="no dimension above 1"):
        check_sizes({"model_type": "llama", "hidden_size": 2}, weights, "m")


def test_a_message_contains_only_known_field_names(llama):
    with pytest.raises(UnsupportedArchitectureError) as caught:
        check_sizes(LLAMA | {"config": {"my canary": {"n_layers": HUGE}, "x": {"n_layers": HUGE}}}, llama, "m")
    assert "canary" not in str(caught.value)


@given(st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.lists(st.integers()) | st.integers())
def test_only_valid_numbers_are_read_as_numbers(value):
    found = find_number({"a": value, "text_config": value}, ("a",))
    assert found == (value if type(value) is int and 0 < value < 2**63 else None)
    assert longer_side({"a": value}, "a") >= 0
