"""Early checks compared with the library's: they may know less, but never refuse what the library accepts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rocket_core.checkpoint import find_model
from rocket_core.config import CalibrationConfig, CompressionConfig, compression_config
from rocket_core.errors import (
    AlreadyQuantizedError,
    InfeasibleBudgetError,
    RocketError,
    UnknownDatasetError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.hf.names import disk_names
from rocket_core.inspection.checks import preconditions
from rocket_core.inspection.checks.feasibility import any_selection_allows, check_feasible, reach_of_layers
from rocket_core.inspection.checks.preconditions import (
    UNSUPPORTED,
    check_calibration,
    check_config,
    check_ignore,
    check_weights,
    parse_config,
)
from rocket_core.inspection.files.safetensors_headers import local_weight_files, read_header
from rocket_core.inspection.headers.layer_names import PREFIXES
from rocket_core.inspection.headers.model_fields import check_sizes, input_kind
from rocket_core.inspection.headers.weight_summary import WeightSummary, summarize_files
from rocket_core.models.architecture import build_architecture, ignored_layers, read_config
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.sizes.target import ByBits, ByRatio
from tests.reference.tiny_models import ALL_FAMILIES, byte_tokenizer, save_tiny_model

COMMON = {
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
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16}
# Fused, merged and unusual models: experts, latent attention, convolutions, routers, different names on disk.
MORE = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "cohere": {},
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
    },
    "gemma3_text": {"head_dim": 8},
    "gpt_bigcode": GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "gpt_oss": {"num_local_experts": 2, "head_dim": 8},
    "gptj": {**GPT, "rotary_dim": 4},
    "jamba": {"num_experts": 2, "mamba_d_state": 4},
    "llama4_text": {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 32},
    "mamba": {"state_size": 4},
    "mixtral": {"num_local_experts": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "qwen2_moe": {**EXPERTS, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32},
}
RATIOS = (0.3, 0.69, 0.705, 0.71, 0.72, 0.75, 0.8, 0.95)


def verdict(judge, *arguments):
    try:
        judge(*arguments)
    except RocketError as error:
        return type(error)
    return None


def inspect(folder, ratio):
    config = parse_config((folder / "config.json").read_bytes(), "m")
    check_config(config, "m")
    files = local_weight_files(folder, "m")
    weights = summarize_files(read_header(file, file.name) for file in files)
    check_weights(weights, "m")
    check_feasible(config, weights, CompressionConfig(ratio=ratio), "m")


def prepare(folder, ratio):
    text = input_kind(parse_config((folder / "config.json").read_bytes(), "m")) == "text"
    calibration = CalibrationConfig(dataset="builtin" if text else "synthetic")
    prepare_run(find_model(str(folder)), CompressionConfig(ratio=ratio, calibration=calibration))


def save(family, folder):
    if family in ALL_FAMILIES:
        return save_tiny_model(family, folder)
    config = AutoConfig.for_model(family, **(COMMON | MORE[family]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*ALL_FAMILIES, *MORE])
def test_it_never_refuses_what_the_library_accepts(family, tmp_path):
    folder = save(family, tmp_path)
    for ratio in RATIOS:
        early, late = verdict(inspect, folder, ratio), verdict(prepare, folder, ratio)
        # The library reports first that it cannot compress a model at all.
        assert early in {None, late, InfeasibleBudgetError if late else None}, ratio
    assert verdict(inspect, folder, 0.95) is InfeasibleBudgetError
    # The library calls this as well, so both agree in any case.
    check_sizes(*described(folder), "m")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        {"model_type": "llama", "quantization_config": {}},
        {"model_type": "clip"},
        {"model_type": "albert", "num_attention_heads": 4},
        {"model_type": 5},
        {"model_type": None},
        {},
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 32},
        {"auto_map": {"AutoConfig": "x.Y"}, "architectures": ["CustomForCausalLM"]},
    ],
)
def test_it_refuses_with_the_same_code_as_the_library(fields, tmp_path):
    import json

    save_tiny_model("llama", tmp_path)
    file = tmp_path / "config.json"
    kept = {} if "model_type" not in fields else json.loads(file.read_text())
    file.write_text(json.dumps(kept | fields))
    assert verdict(inspect, tmp_path, 0.3) is verdict(prepare, tmp_path, 0.3) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "quantization_config": None},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}},
        {"model_type": "llama", "other": {"quantization_config": {"bits": 4}}},
    ],
)
def test_it_accepts_what_only_looks_odd(fields, tmp_path):
    import json

    save_tiny_model("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert verdict(prepare, tmp_path, 0.3) is None
    assert verdict(inspect, tmp_path, 0.3) is None


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_several_models_in_one_are_refused_with_the_part_to_take(family):
    with pytest.raises(UnsupportedArchitectureError, match="of which one can be compressed: the thinker"):
        check_config({"model_type": family}, "m")


def test_unsupported_families_exist_in_transformers():
    assert set(CONFIG_MAPPING_NAMES) >= UNSUPPORTED


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_input_kind_can_be_read_from_the_config(family, tmp_path):
    save_tiny_model(family, tmp_path)
    config = parse_config((tmp_path / "config.json").read_bytes(), "m")
    assert input_kind(config) == build_architecture(read_config(tmp_path), torch.float32).kind


@pytest.mark.parametrize(
    ("kind", "dataset", "wanted"),
    [
        ("images", "builtin", "a folder of .png and .jpg images"),
        ("images", "text.txt", "cost in quality"),
        ("audio", "wikitext2", "a folder of .wav files"),
        ("text", "synthetic", "'builtin', one of wikitext2"),
        ("text", "FOLDER", "or .parquet file, or a folder with .txt and .md files"),
    ],
)
def test_data_of_another_kind_is_refused_with_the_right_kind(tmp_path, kind, dataset, wanted):
    dataset = dataset.replace("FOLDER", str(tmp_path))
    with pytest.raises(UnknownDatasetError, match=wanted):
        check_calibration(kind, dataset, None, "m")


@pytest.mark.parametrize(
    ("kind", "dataset"),
    [("images", "synthetic"), ("audio", "."), ("text", "c4"), ("text", "upload/0"), ("text", "o/n:train")],
)
def test_data_of_the_right_kind_is_accepted(kind, dataset):
    check_calibration(kind, dataset, None, "m")


def test_a_folder_of_texts_is_text(tmp_path):
    (tmp_path / "a.md").write_text("text")
    check_calibration("text", str(tmp_path), None, "m")


@pytest.mark.parametrize("raw", [b"{", b"[]", b"1", b"\xff", b"[" * 100_000])
def test_an_invalid_config_is_refused(raw):
    with pytest.raises(UnsupportedArchitectureError, match=r"config\.json of m"):
        parse_config(raw, "m")


def test_a_model_without_blocks_has_nothing_to_compress():
    weights = WeightSummary(dtype_bytes={"F32": 8}, block_shapes={(0, 4): 1})
    with pytest.raises(UnsupportedArchitectureError, match="nothing to compress"):
        check_weights(weights, "m")


def test_quantized_weights_are_reported_before_the_ratio():
    weights = WeightSummary(dtype_bytes={"I8": 8}, block_shapes={(64, 64): 1})
    with pytest.raises(AlreadyQuantizedError, match="I8"):
        check_feasible({}, weights, CompressionConfig(ratio=0.95), "m")


@pytest.mark.parametrize("kind", ["llama", "unknown_family"])
def test_an_unreachable_ratio_names_one_the_library_accepts(kind):
    layers = {"q_proj": (640, 640), "down_proj": (640, 1728)}
    matrices = tuple((f"model.layers.{block}.{name}", shape) for block in range(2) for name, shape in layers.items())
    weights = WeightSummary(
        dtype_bytes={"F32": 8},
        block_shapes={(640, 640): 2, (640, 1728): 2},
        matrices=matrices,
        block_parameters={f"model.layers.{block}": 640 * (640 + 1728) for block in range(2)},
    )
    with pytest.raises(InfeasibleBudgetError, match="at most") as caught:
        check_feasible({"model_type": kind}, weights, CompressionConfig(ratio=0.9), "m")
    assert 0.69 <= caught.value.nearest_ratio < 0.71
    check_feasible({"model_type": kind}, weights, CompressionConfig(ratio=caught.value.nearest_ratio), "m")


SIDE = st.integers(1, 200)


@settings(deadline=None)
@given(st.lists(st.tuples(SIDE, SIDE, st.booleans(), st.booleans()), min_size=1, max_size=8), st.floats(0, 0.999))
def test_no_ratio_reachable_by_any_selection_is_refused(weights, ratio):
    stored = WeightSummary(dtype_bytes={"F32": 1}, block_shapes={(rows, columns): 1 for rows, columns, _, _ in weights})
    if any_selection_allows(stored, ByRatio(ratio=ratio), CompressionConfig(ratio=ratio), 4):
        return
    # In either orientation, and any of them.
    layers = [(columns, rows) if turned else (rows, columns) for rows, columns, _, turned in weights]
    chosen = [layer for layer, (_, _, is_layer, _) in zip(layers, weights, strict=True) if is_layer] or layers[:1]
    assert not reach_of_layers(chosen, itemsize=4, other_bytes=0).allows(ByRatio(ratio=ratio))


@settings(deadline=None)
@given(
    st.lists(st.tuples(SIDE, SIDE, st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 1600),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_no_bits_reachable_by_any_selection_are_refused(weights, hundredths, itemsize, quantizes):
    stored = WeightSummary(dtype_bytes={"F32": 1}, block_shapes={(rows, columns): 1 for rows, columns, _, _ in weights})
    target = ByBits(bits=hundredths / 100)
    config = compression_config(bits=target.bits, kinds=("quantized", "sparse") if quantizes else ("sparse",))
    if not any_selection_allows(stored, target, config, itemsize):
        layers = [(columns, rows) if turned else (rows, columns) for rows, columns, _, turned in weights]
        chosen = [layer for layer, (_, _, is_layer, _) in zip(layers, weights, strict=True) if is_layer] or layers[:1]
        reach = reach_of_layers(chosen, itemsize=itemsize, other_bytes=0, quantizes=quantizes)
        assert not reach.allows(target)


def test_families_with_custom_code_are_not_in_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert not preconditions.OWN_CODE_ONLY & set(CONFIG_MAPPING_NAMES)
    # A known family may bring code too, which is ignored.
    preconditions.check_config({"model_type": "phi3", "auto_map": {"AutoConfig": "a.B"}}, "m")
    with pytest.raises(UnsupportedArchitectureError, match="its own code"):
        preconditions.check_config({"model_type": "baichuan", "auto_map": {"AutoConfig": "a.B"}}, "m")
    assert set(preconditions.CONVERTED.values()) <= set(CONFIG_MAPPING_NAMES)
    assert set(preconditions.CONVERTED) <= preconditions.OWN_CODE_ONLY
    with pytest.raises(UnsupportedArchitectureError, match="the family as 'glm', use a checkpoint"):
        preconditions.check_config({"model_type": "chatglm", "auto_map": {"AutoConfig": "a.B"}}, "m")


def test_a_block_shared_by_all_layers_is_refused_with_the_reason():
    with pytest.raises(UnsupportedArchitectureError, match="share the weights of one block"):
        preconditions.check_config({"model_type": "albert"}, "m")


def described(folder):
    files = local_weight_files(folder, "m")
    weights = summarize_files(read_header(file, file.name) for file in files)
    return parse_config((folder / "config.json").read_bytes(), "m"), weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*ALL_FAMILIES, *MORE])
def test_patterns_that_the_library_accepts_are_never_refused(family, tmp_path):
    folder = save(family, tmp_path)
    config, weights = described(folder)
    try:
        architecture = build_architecture(read_config(folder), torch.float32)
    except UnsupportedArchitectureError:
        return
    names = [name for block in architecture.layers for name in block]
    for name in names:
        first, last = name.split(".", 1)[0], name.rsplit(".", 1)[-1]
        patterns = (name, f"*.{last}", f"{first}.*", f"*{name[3:]}")
        ignored_layers(names, patterns)
        check_ignore(config, weights, patterns, "m")


@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) & set(PREFIXES)))
def test_an_unmatched_pattern_is_refused_by_position_only(family, tmp_path):
    folder = save_tiny_model(family, tmp_path)
    config, weights = described(folder)
    names = [name for block in build_architecture(read_config(folder), torch.float32).layers for name in block]
    leaf = names[0].rsplit(".", 1)[-1]
    for wrong in ("canary", f"*.{leaf}x_canary", "*.canary.*", "*.7.*"):
        patterns = [f"*.{leaf}", wrong]
        with pytest.raises(UnmatchedIgnoreError) as late:
            ignored_layers(names, patterns)
        with pytest.raises(UnmatchedIgnoreError) as early:
            check_ignore(config, weights, patterns, "m")
        assert early.value.position == late.value.position == 1
        assert "canary" not in str(early.value)
        assert str(early.value).startswith("ignore pattern 2 of 2 matches no layer of m; ")
        assert f"'*.{leaf}'" in str(early.value) or "layers are called like" in str(early.value)


def test_an_almost_matching_pattern_gets_a_suggestion():
    weights = WeightSummary(dtype_bytes={"F32": 1}, block_shapes={(2, 2): 1}, matrices=(("h.0.attn.c_attn", (2, 2)),))
    with pytest.raises(
        UnmatchedIgnoreError, match=r"the ignore pattern matches no layer of m; did you mean '\*.c_attn'"
    ):
        check_ignore({"model_type": "gpt2"}, weights, ("*.c_atn",), "m")
    # As the built model calls it.
    check_ignore({"model_type": "gpt2"}, weights, ("transformer.h.0.*", "*.c_attn"), "m")


def test_expensive_or_unknown_comparisons_are_left_to_preflight():
    weights = WeightSummary(dtype_bytes={"F32": 1}, block_shapes={(2, 2): 1}, matrices=(("h.0.attn.c_attn", (2, 2)),))
    check_ignore({"model_type": "gpt2"}, weights, ("none",) * 5_000_000, "m")
    for kind in ("mixtral", "of_a_newer_transformers"):
        check_ignore({"model_type": kind}, weights, ("none",), "m")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(PREFIXES))
def test_known_families_have_the_same_names_in_files_and_models(family):
    config = AutoConfig.for_model(family)
    for depth in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"):
        if hasattr(config, depth):
            setattr(config, depth, 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    architecture = build_architecture(config, torch.float32)
    names = [name for block in architecture.layers for name in block]

    assert architecture.model.base_model_prefix == PREFIXES[family]
    assert disk_names(architecture.model, names) == {name: name for name in names}
    # None of the old file names that transformers still reads belongs to a layer.
    renamed = {
        pattern
        for conversion in get_model_conversion_mapping(architecture.model, add_legacy=False)
        for pattern in conversion.source_patterns
    }
    assert renamed <= {r"^embed_out\."}
