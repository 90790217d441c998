import json

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoConfig,
    BertConfig,
    CLIPConfig,
    LlamaConfig,
    T5Config,
    Wav2Vec2Config,
)

from rocket_core.errors import (
    AlreadyQuantizedError,
    InvalidConfigError,
    ModelNotFoundError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.models.architecture import (
    build_architecture,
    ignored_layers,
    oriented_weight,
    read_config,
    window_length,
)
from tests.reference.tiny_models import ALL_FAMILIES, FAMILIES

SEPARATE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
GATED = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "out_proj"]
BERT = [
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
]
WHISPER = [*(f"self_attn.{name}" for name in ATTENTION), "fc1", "fc2"]
T5_MLP = ["DenseReluDense.wi_0", "DenseReluDense.wi_1", "DenseReluDense.wo"]
# Names of the list of blocks, and of the layers in each of its blocks; an encoder-decoder has two lists.
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
    "openai_gpt": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    "opt": (
        "model.decoder.layers",
        ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2"],
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ),
    "falcon": (
        "transformer.h",
        ["self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ),
    "bert": ("encoder.layer", BERT),
    "roberta": ("roberta.encoder.layer", BERT),
    "distilbert": (
        "distilbert.transformer.layer",
        [*(f"attention.{name}_lin" for name in ("q", "k", "v", "out")), "ffn.lin1", "ffn.lin2"],
    ),
    "vit": ("vit.layers", [*(f"attention.{name}_proj" for name in "qkvo"), "mlp.fc1", "mlp.fc2"]),
    "siglip_vision": ("encoder.layers", [*(f"self_attn.{name}" for name in ATTENTION), "mlp.fc1", "mlp.fc2"]),
}
EXPECTED_PAIRS = {
    "t5": {
        "encoder.block": [
            *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
            *(f"layer.1.{name}" for name in T5_MLP),
        ],
        "decoder.block": [
            *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
            *(f"layer.1.EncDecAttention.{name}" for name in "qkvo"),
            *(f"layer.2.{name}" for name in T5_MLP),
        ],
    },
    "whisper": {
        "model.encoder.layers": WHISPER,
        "model.decoder.layers": [*WHISPER, *(f"encoder_attn.{name}" for name in ATTENTION)],
    },
}


def built(model):
    """Return the architecture of a model's own class, as a saved config names it."""
    model.config.architectures = [type(model).__name__]
    return build_architecture(model.config, torch.float32)


@pytest.mark.parametrize("family", EXPECTED)
def test_it_finds_the_blocks_and_all_their_linear_layers(family):
    model = ALL_FAMILIES[family]()
    architecture = built(model)
    assert type(architecture.model) is type(model)
    blocks, names = EXPECTED[family]
    assert [found.name for found in architecture.lists] == [blocks]
    assert architecture.blocks is architecture.model.get_submodule(blocks)
    for index, layers in enumerate(architecture.layers):
        assert architecture.block_name(index) == f"{blocks}.{index}"
        assert sorted(layers) == sorted(f"{blocks}.{index}.{name}" for name in names)


@pytest.mark.parametrize("family", EXPECTED_PAIRS)
def test_blocks_of_encoder_and_decoder_are_found_in_run_order(family):
    model = ALL_FAMILIES[family]()
    architecture = built(model)
    assert type(architecture.model) is type(model)
    assert [found.name for found in architecture.lists] == list(EXPECTED_PAIRS[family])
    expected = [
        sorted(f"{blocks}.{index}.{name}" for name in names)
        for blocks, names in EXPECTED_PAIRS[family].items()
        for index in range(len(model.get_submodule(blocks)))
    ]
    assert [sorted(layers) for layers in architecture.layers] == expected
    for index, layers in enumerate(architecture.layers):
        assert all(name.startswith(f"{architecture.block_name(index)}.") for name in layers)
    with pytest.raises(UnsupportedArchitectureError, match="encoder-decoder"):
        _ = architecture.blocks


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", set()),
        ("bert", set()),
        ("roberta", set()),
        ("t5", set()),
        ("whisper", set()),
        ("vit", set()),
    ],
)
def test_tables_that_stay_dense_have_a_reason(family, expected):
    architecture = built(ALL_FAMILIES[family]())
    assert set(architecture.other_tables) == expected
    assert all(architecture.other_tables.values())


def test_only_heads_that_predict_next_tokens_are_measured():
    [masked] = built(ALL_FAMILIES["roberta"]()).tables
    assert masked.modules == ("roberta.embeddings.word_embeddings", "lm_head.decoder")
    assert masked.measured_modules == ("roberta.embeddings.word_embeddings",)
    [causal] = built(ALL_FAMILIES["gpt2"]()).tables
    assert causal.measured_modules == causal.modules == ("transformer.wte", "lm_head")


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_shapes_match_real_weights_without_allocation(family):
    model = ALL_FAMILIES[family]()
    architecture = built(model)
    assert all(parameter.is_meta for parameter in architecture.model.parameters())
    names = [name for block in architecture.layers for name in block]
    for name in names:
        assert architecture.shape(name) == tuple(oriented_weight(model.get_submodule(name)).shape)
    expected = sum(model.get_submodule(name).weight.numel() for name in names)
    assert architecture.compressible_parameters == expected


BERT_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        ({"architectures": None}, "BertModel"),
        ({"architectures": ["BertForNothing"]}, "BertModel"),
        # Classes of another family, or that are not models, are ignored.
        ({"architectures": ["LlamaForCausalLM"]}, "BertModel"),
        ({"architectures": ["pipeline"]}, "BertModel"),
        ({"architectures": ["BertLMHeadModel"], "is_decoder": True}, "BertLMHeadModel"),
    ],
)
def test_a_model_is_built_as_the_class_in_its_config(fields, expected):
    architecture = build_architecture(BertConfig(**BERT_SIZES, **fields), torch.float32)
    assert type(architecture.model).__name__ == expected
    assert architecture.is_causal == ("is_decoder" in fields)
    assert architecture.kind == "text"


@pytest.mark.parametrize(
    ("named", "built_as"),
    [
        ("LlamaForSequenceClassification", "LlamaForSequenceClassification"),
        ("LlamaModel", "LlamaModel"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("LlamaForProcessRewardModel", "LlamaModel"),
        (None, "LlamaForCausalLM"),
    ],
)
def test_a_decoder_is_built_with_the_head_that_is_named(named, built_as):
    config = FAMILIES["llama"]().config
    config.architectures = None if named is None else [named]
    architecture = build_architecture(config, torch.float32)
    assert architecture.class_name == ("AutoModelForCausalLM" if built_as == "LlamaForCausalLM" else built_as)
    assert type(architecture.model).__name__ == built_as
    assert architecture.is_causal == (built_as == "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (CLIPConfig(), "2 lists of blocks"),
        (AlbertConfig(**BERT_SIZES), "2 layers on the weights of 1"),
        (Wav2Vec2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2), "reads input_values"),
        (T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, is_encoder_decoder=False), "2 lists"),
    ],
)
def test_a_model_without_a_list_of_blocks_is_refused(config, match):
    with pytest.raises(UnsupportedArchitectureError, match=match):
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


@pytest.mark.parametrize(("written", "advises"), [("99.1.0", True), ("4.30.0", False), ("soon", False), (5, False)])
def test_a_model_of_a_later_transformers_advises_to_upgrade(tmp_path, written, advises):
    fields = {"model_type": "no-such-model", "transformers_version": written}
    with pytest.raises(UnsupportedArchitectureError) as refused:
        read_config(write_config(tmp_path, **fields))
    assert ("transformers '99.1.0', and" in str(refused.value)) == advises


@pytest.mark.parametrize("method", ["gptq", "rocket", "compressed-tensors"])
def test_quantized_checkpoints_are_refused(tmp_path, method):
    folder = write_config(tmp_path, model_type="llama", quantization_config={"quant_method": method})
    with pytest.raises(AlreadyQuantizedError, match=method):
        read_config(folder)


NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_ignore_patterns_exclude_matching_layers():
    ignored = ignored_layers(NAMES, ["*.q_proj", "model.layers.1.*"])
    assert ignored == {NAMES[0]: "*.q_proj", NAMES[2]: "model.layers.1.*"}


@pytest.mark.parametrize("pattern", ["down_proj", "*.down_prj", "*.DOWN_PROJ"])
def test_an_unmatched_ignore_pattern_is_an_error_with_a_hint(pattern):
    with pytest.raises(UnmatchedIgnoreError, match=r"matches none of the 3"):
        ignored_layers(NAMES, [pattern])
    if pattern != "*.DOWN_PROJ":
        with pytest.raises(UnmatchedIgnoreError, match=r"did you mean '\*\.down_proj'"):
            ignored_layers(NAMES, [pattern])


def test_an_unfamiliar_pattern_is_answered_with_layer_names():
    with pytest.raises(
        UnmatchedIgnoreError, match=r"called like 'model.*q_proj' and end in down_proj, q_proj"
    ) as raised:
        ignored_layers(NAMES, ["*.q_proj", "encoder.*"])
    assert raised.value.position == 1


def test_window_length_defaults_to_the_models_context():
    assert window_length(LlamaConfig(max_position_embeddings=64), None) == 64
    assert window_length(LlamaConfig(max_position_embeddings=8192), None) == 1024
    assert window_length(LlamaConfig(max_position_embeddings=8192), 2048) == 2048
    with pytest.raises(InvalidConfigError, match="64 tokens at most"):
        window_length(LlamaConfig(max_position_embeddings=64), 65)


def test_configs_of_all_families_have_a_window_length():
    for family, build in ALL_FAMILIES.items():
        config = AutoConfig.for_model(**build().config.to_dict())
        if "vocab_size" in config.to_dict():
            assert window_length(config, None) == 64, family


@pytest.mark.parametrize(
    "field", [{"quantization_config": "x"}, {"quantization_config": []}, {"model_type": ["llama"]}]
)
def test_a_config_with_fields_of_the_wrong_type_is_refused(tmp_path, field):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | field))
    with pytest.raises(UnsupportedArchitectureError):
        read_config(tmp_path)
