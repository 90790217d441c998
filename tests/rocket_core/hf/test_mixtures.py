import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rocket_core.experts import has_unfused
from rocket_core.hf import attach_factors, disk_names
from rocket_core.layers import LayerFactors, StoredLinear
from tests.reference.tiny_mixtures import EXPERT_SIZE, EXPERTS, MIXTURES, inputs
from tests.reference.tiny_models import HIDDEN_SIZE
from tests.sampling import sweep

FAMILIES = sweep(
    ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "llama4"],
    soak=["qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "phimoe"],
)
MODULE = {"granitemoe": "block_sparse_moe", "llama4": "feed_forward"}


@torch.no_grad()
def logits(model):
    return model(inputs()).logits


def factors(family, projections=("gate_proj", "up_proj", "down_proj"), attention=True):
    """Return factors of all experts of the last block but one, and of a layer of attention."""
    generator = torch.Generator().manual_seed(2)
    prefix, found = f"model.layers.1.{MODULE.get(family, 'mlp')}.experts", {}
    for expert in range(EXPERTS - 1):
        for projection in projections:
            down = projection == "down_proj"
            d_in, d_out = (EXPERT_SIZE, HIDDEN_SIZE) if down else (HIDDEN_SIZE, EXPERT_SIZE)
            coefficients = torch.randn(9, d_out, generator=generator) * 0.3
            support = torch.rand(9, d_out, generator=generator) < 0.5
            found[f"{prefix}.{expert}.{projection}"] = LayerFactors(
                dictionary=torch.randn(d_in, 9, generator=generator) / d_in**0.5,
                coefficients=coefficients * support,
                support=support,
            )
    if attention:
        found["model.layers.0.self_attn.o_proj"] = LayerFactors(
            dictionary=None,
            coefficients=torch.randn(32, HIDDEN_SIZE, generator=generator) * 0.1,
        )
    return found


def artifact(family, folder, **options):
    """Write a mixture with compressed experts, and return it in memory."""
    model = MIXTURES[family]()
    attach_factors(model, factors(family, attention=family == "mixtral", **options))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_a_loaded_mixture_equals_that_in_memory(self, family, tmp_path):
        model = artifact(family, tmp_path)
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(logits(loaded), logits(model))
        stored = [name for name, module in loaded.named_modules() if isinstance(module, StoredLinear)]
        assert len([name for name in stored if ".experts." in name]) == 3 * (EXPERTS - 1)
        assert not torch.allclose(logits(loaded), logits(MIXTURES[family]()), atol=1e-2)
        tokens = [each.generate(inputs()[:1, :8], max_new_tokens=6, do_sample=False) for each in (model, loaded)]
        assert torch.equal(*tokens)

    def test_saving_again_writes_the_same_files(self, family, tmp_path):
        artifact(family, tmp_path / "first")
        AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()

    def test_dequantizing_gives_back_the_original_layout(self, family, tmp_path):
        artifact(family, tmp_path / "artifact")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "artifact")
        expected = logits(model)
        model.dequantize()
        assert not has_unfused(model)
        original = MIXTURES[family]()
        assert list(model.state_dict()) == list(original.state_dict())
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        for folder, one in (("dense", model), ("original", original)):
            one.save_pretrained(tmp_path / folder)
        dense, stock = (load_file(tmp_path / folder / "model.safetensors") for folder in ("dense", "original"))
        assert {key: value.shape for key, value in dense.items()} == {key: value.shape for key, value in stock.items()}
        assert "quantization_config" not in model.config.to_dict()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
        torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


def test_a_mixture_with_dense_experts_keeps_their_layout(tmp_path):
    model = MIXTURES["mixtral"]()
    attach_factors(model, {name: one for name, one in factors("mixtral").items() if "self_attn" in name})
    assert not has_unfused(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not has_unfused(loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_names_of_experts_are_those_of_their_family():
    model = MIXTURES["mixtral"]()
    names = factors("mixtral")
    attach_factors(model, names)
    disk = disk_names(model, names)
    assert disk["model.layers.1.mlp.experts.2.down_proj"] == "model.layers.1.block_sparse_moe.experts.2.w2"
    assert disk["model.layers.0.self_attn.o_proj"] == "model.layers.0.self_attn.o_proj"


def test_loaded_weights_survive_compression_in_memory(tmp_path):
    MIXTURES["mixtral"]().save_pretrained(tmp_path / "dense")
    loaded, built = AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), MIXTURES["mixtral"]()
    for model in (loaded, built):
        attach_factors(model, factors("mixtral"))
    assert torch.equal(logits(loaded), logits(built))
    for name, model in (("loaded", loaded), ("built", built)):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("loaded", "built")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][key]) for key, value in files[0].items())
