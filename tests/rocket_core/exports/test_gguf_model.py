import json
import re

import gguf
import pytest
import torch

from rocket_core.errors import UnsupportedExportError
from rocket_core.experts import unfuse
from rocket_core.exports.gguf_families import FAMILIES
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_tensors import TensorRules
from tests.reference import gguf_models

ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    gguf_models.save_tokenizer("prefixed", folder)
    return folder


def settings_of(name, **changes):
    model_class, config_class, own = gguf_models.MODELS[name]
    config = config_class(**(gguf_models._COMMON | own)).to_dict()
    return config | {"architectures": [model_class.__name__]} | changes


def test_models_of_every_family_are_tested():
    assert {model_class.__name__ for model_class, *_ in gguf_models.MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_names_are_those_of_the_gguf_package(name, folder):
    plan = plan_gguf(settings_of(name), folder)
    names = gguf.get_tensor_name_map(ARCHITECTURES[plan.family.arch], 8)
    with torch.device("meta"):
        model = gguf_models.build(name)
        unfuse(model)
    keys = [key for key in model.state_dict() if not (plan.tied and key == "lm_head.weight")]
    for key in keys:
        joined = re.sub(r"\.experts\.\d+\.", ".experts.", key)
        # llama.cpp has no tensor without a suffix.
        suffix = "" if key.endswith(("weight", "bias")) else ".weight"
        assert plan.tensor(key).name == names.get_name(joined, try_suffixes=(".weight", ".bias")) + suffix, key
    if plan.tied:
        assert plan.tensor("lm_head.weight") is None


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_keys_are_those_of_the_gguf_package(name, folder):
    plan = plan_gguf(settings_of(name), folder, name="A name")
    known = {
        value.replace("{arch}", plan.family.arch)
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    assert set(plan.metadata) <= known
    assert plan.metadata["general.name"].content == "A name"


@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_experts_of_mixtral_checkpoints_are_known(part, folder):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    rules = plan_gguf(settings_of("mixtral"), folder).tensor(f"model.layers.1.block_sparse_moe.experts.3.{part}.weight")
    assert rules.name == names.get_name(f"layers.1.feed_forward.experts.{part}") + ".weight"
    assert rules.expert == 3


@pytest.mark.parametrize("name", gguf_models.MIXTURES)
def test_counts_and_sizes_of_experts_are_told(name, folder):
    settings, plan = settings_of(name), plan_gguf(settings_of(name), folder)
    told = {key.partition(".")[2]: value.content for key, value in plan.metadata.items() if "expert" in key}
    inner = settings["intermediate_size"] if name == "gpt_oss" else settings.get("moe_intermediate_size")
    sizes = {
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": settings.get("shared_expert_intermediate_size"),
    }
    expected = {"expert_count": gguf_models.EXPERTS, "expert_used_count": 2}
    assert told == expected | {key: value for key, value in sizes.items() if value is not None}


def test_a_missing_expert_is_named(folder):
    plan = plan_gguf(settings_of("olmoe"), folder)
    keys = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in (0, 1, 3)]
    with pytest.raises(UnsupportedExportError, match=r"3 experts for blk\.0\.ffn_up_exps\.weight, and its settings 4"):
        plan.tensors([(key, (96, 64), "F32") for key in keys])


def test_rows_of_queries_and_keys_are_interleaved():
    heads, size = 3, 8
    rows = torch.arange(heads * size)
    expected = rows.view(heads, 2, size // 2).transpose(1, 2).reshape(-1)
    assert TensorRules(name="q", head_rows=size).row_order(heads * size) == expected.tolist()
    assert TensorRules(name="v").row_order(24) is None


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_only_llama_has_its_rows_reordered(name, folder):
    plan = plan_gguf(settings_of(name), folder)
    ordered = [plan.tensor(f"model.layers.1.self_attn.{part}_proj.weight").head_rows > 0 for part in "qkvo"]
    assert ordered == ([True, True, False, False] if name == "llama" else [False] * 4)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ("llama", {"architectures": None}, "None"),
        ("llama", {"hidden_act": "relu"}, "relu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"rope_parameters": gguf_models._LLAMA3}, "llama3"),
        ("llama", {"rope_parameters": gguf_models._LONGROPE}, "longrope"),
        ("yarn", {"rope_parameters": gguf_models._YARN | {"attention_factor": 2.0}}, "attention_factor"),
        ("gemma", {"tie_word_embeddings": False}, "head"),
        ("gemma2", {"query_pre_attn_scalar": 144}, "144"),
        ("gemma3", {"layer_types": ["full_attention"] * 7}, "windows"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "soft-capped"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "part of each head"),
        ("llama", {"vocab_size": 300}, "more than the model"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True, and llama.cpp takes"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False, and llama.cpp scales"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "blocks without experts"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "blocks without experts"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"num_key_value_heads": 2}, "2 heads of keys"),
        ("olmoe", {"tie_word_embeddings": True}, "needs a separate one"),
        ("qwen2_moe", {"head_dim": 32}, "4 heads of size 32"),
    ],
)
def test_what_llama_cpp_cannot_express_is_named(name, changes, reason, folder):
    plan_gguf(settings_of(name), folder)
    with pytest.raises(UnsupportedExportError, match=reason):
        plan_gguf(settings_of(name, **changes), folder)


def test_unknown_tensors_are_refused(folder):
    plan = plan_gguf(settings_of("llama"), folder)
    assert plan.tensor("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    for key in ("model.layers.0.mlp.experts.0.up_proj.weight", "score.weight"):
        with pytest.raises(UnsupportedExportError, match=key):
            plan.tensor(key)


@pytest.mark.parametrize(
    ("changes", "length"), [({}, 256), ({"sliding_window": 64}, 64), ({"use_sliding_window": False}, 256)]
)
def test_windows_that_are_not_applied_bound_the_context(changes, length, folder):
    plan = plan_gguf(settings_of("mistral", **({"sliding_window": None} | changes)), folder)
    assert plan.metadata["llama.context_length"].content == length


def _edit(folder, change):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: one["model"].update(type="Unigram"), "Unigram"),
        (lambda one: one.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda one: one.update(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (lambda one: one["pre_tokenizer"].update(add_prefix_space=True), "ByteLevel"),
        (lambda one: one.update(post_processor={"type": "BertProcessing"}), "BertProcessing"),
        (lambda one: one["post_processor"]["single"][0]["SpecialToken"].update(id="<pad>"), "token 0"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(change, reason, tmp_path):
    gguf_models.save_tokenizer("gpt-2", tmp_path)
    plan_gguf(settings_of("llama"), tmp_path)
    _edit(tmp_path, change)
    with pytest.raises(UnsupportedExportError, match=reason):
        plan_gguf(settings_of("llama"), tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, "many", [], {}, 0, -1, 10**12])
def test_malformed_settings_are_refused(key, value, folder):
    config = settings_of("llama", head_dim=None, **{key: value})
    with pytest.raises(UnsupportedExportError):
        plan_gguf(config, folder)


@pytest.mark.parametrize("raw", ["[]", "{", "{}", '{"model": []}', '{"model": {"vocab": 3, "merges": [1]}}'])
def test_malformed_tokenizers_are_refused(raw, tmp_path):
    (tmp_path / "tokenizer.json").write_text(raw)
    with pytest.raises(UnsupportedExportError):
        plan_gguf(settings_of("llama"), tmp_path)


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(UnsupportedExportError, match=r"tokenizer\.json"):
        plan_gguf(settings_of("llama"), tmp_path)


def test_tokenizers_without_a_beginning_add_none(tmp_path):
    gguf_models.save_tokenizer("gpt-2", tmp_path, begins=False)
    metadata = plan_gguf(settings_of("llama"), tmp_path).metadata
    assert metadata["tokenizer.ggml.add_bos_token"].content is False
    assert metadata["tokenizer.ggml.bos_token_id"].content == 1
