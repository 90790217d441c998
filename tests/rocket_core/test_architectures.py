import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MixtralConfig, T5Config

from rocket_core.architectures import (
    build_architecture,
    ignored_layers,
    oriented_weight,
    read_config,
    window_length,
)
from rocket_core.errors import (
    AlreadyQuantizedError,
    InvalidConfigError,
    ModelNotFoundError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from tests.reference.tiny_models import FAMILIES

SEPARATE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
GATED = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
EXPECTED = {
    "llama": ("model.layers", SEPARATE + GATED),
    "qwen3": ("model.layers", SEPARATE + GATED),
    "mistral": ("model.layers", SEPARATE + GATED),
    "gemma": ("model.layers", SEPARATE + GATED),
    "phi3": (
        "model.layers",
        ["self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    ),
    "gpt2": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    "opt": (
        "model.decoder.layers",
        ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2"],
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_the_blocks_and_every_linear_layer_in_them(family):
    architecture = build_architecture(FAMILIES[family]().config, torch.float32)
    blocks, names = EXPECTED[family]
    assert architecture.blocks_name == blocks
    for index, layers in enumerate(architecture.layers):
        assert sorted(layers) == sorted(f"{blocks}.{index}.{name}" for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_real_weights_and_nothing_is_allocated(family):
    model = FAMILIES[family]()
    architecture = build_architecture(model.config, torch.float32)
    assert all(parameter.is_meta for parameter in architecture.model.parameters())
    names = [name for block in architecture.layers for name in block]
    for name in names:
        assert architecture.shape(name) == tuple(oriented_weight(model.get_submodule(name)).shape)
    expected = sum(model.get_submodule(name).weight.numel() for name in names)
    assert architecture.compressible_parameters == expected


def test_fused_experts_are_left_alone():
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    (layers,) = build_architecture(config, torch.float32).layers
    assert {name.rsplit(".", 1)[1] for name in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedArchitectureError, match="decoder-only"):
        build_architecture(config, torch.float32)


def write_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "fields", [{}, {"model_type": "no-such-model"}, {"model_type": "custom", "auto_map": {"AutoConfig": "x.Y"}}]
)
def test_an_unknown_model_type_is_refused(tmp_path, fields):
    with pytest.raises(UnsupportedArchitectureError):
        read_config(write_config(tmp_path, **fields))


@pytest.mark.parametrize("method", ["gptq", "rocket", "compressed-tensors"])
def test_quantized_checkpoints_are_refused(tmp_path, method):
    folder = write_config(tmp_path, model_type="llama", quantization_config={"quant_method": method})
    with pytest.raises(AlreadyQuantizedError, match=method):
        read_config(folder)


NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_ignore_patterns_take_out_what_they_match():
    ignored = ignored_layers(NAMES, ["*.q_proj", "model.layers.1.*"])
    assert ignored == {NAMES[0]: "*.q_proj", NAMES[2]: "model.layers.1.*"}


@pytest.mark.parametrize("pattern", ["down_proj", "*.down_prj", "*.DOWN_PROJ"])
def test_an_ignore_pattern_without_a_match_is_an_error_with_a_hint(pattern):
    with pytest.raises(UnmatchedIgnoreError, match=r"matches none of the 3"):
        ignored_layers(NAMES, [pattern])
    if pattern != "*.DOWN_PROJ":
        with pytest.raises(UnmatchedIgnoreError, match=r"did you mean '\*\.down_proj'"):
            ignored_layers(NAMES, [pattern])


def test_window_length_defaults_to_what_the_model_attends_to():
    assert window_length(LlamaConfig(max_position_embeddings=64), None) == 64
    assert window_length(LlamaConfig(max_position_embeddings=8192), None) == 1024
    assert window_length(LlamaConfig(max_position_embeddings=8192), 2048) == 2048
    with pytest.raises(InvalidConfigError, match="64 tokens at most"):
        window_length(LlamaConfig(max_position_embeddings=64), 65)


def test_configs_of_all_families_have_a_window_length():
    for build in FAMILIES.values():
        config = AutoConfig.for_model(**build().config.to_dict())
        assert window_length(config, None) == 64


@pytest.mark.parametrize(
    "field", [{"quantization_config": "x"}, {"quantization_config": []}, {"model_type": ["llama"]}]
)
def test_a_config_with_fields_of_the_wrong_type_is_refused(tmp_path, field):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | field))
    with pytest.raises(UnsupportedArchitectureError):
        read_config(tmp_path)
