import dataclasses
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertConfig, BertModel, ViTConfig, ViTModel

from rocket_core.errors import RocketError
from rocket_core.hf import attach_factors
from rocket_core.layers import FactorizedLinear, QuantizedLinear, coefficient_linear, compose_weight
from rocket_core.linalg.integer_codes import RoundedWeight
from tests.reference.factored_models import (
    INPUT_IDS,
    assert_same_logits,
    dense_rows,
    file_bytes,
    load,
    load_unpacked,
    logits,
    mixed_factors,
    quantized_factors,
    random_factors,
    stored_layers,
)
from tests.reference.tiny_models import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE


def weights(model):
    """Return the dense weights that quantized layers keep in addition."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith(".dense")]


def as_stored(factors, dtype):
    """Return factors rounded to the dtype they are stored in."""
    if isinstance(factors, RoundedWeight):
        return factors
    dictionary = None if factors.dictionary is None else factors.dictionary.to(dtype)
    return dataclasses.replace(factors, dictionary=dictionary, coefficients=factors.coefficients.to(dtype))


LAYER = "model.layers.1.mlp.up_proj"


class TestLoading:
    @pytest.mark.parametrize("name", ["llama", "llama, quantized"])
    @pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
    def test_loading_with_a_device_map(self, name, artifacts, device_map):
        model, folder = artifacts[name]
        assert_same_logits(load(folder, device_map=device_map), model)

    @pytest.mark.parametrize("name", ["gpt2", "llama, all kinds", "llama, quantized"])
    def test_loading_shards(self, name, artifacts, tmp_path):
        model, folder = artifacts[name]
        load(folder).save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        loaded = load(tmp_path)
        assert_same_logits(loaded, model)
        loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
        assert file_bytes(tmp_path / "again") == file_bytes(tmp_path)

    def test_loading_in_half_precision(self, tmp_path):
        FAMILIES["llama"]().save_pretrained(tmp_path / "stock")
        model = load(tmp_path / "stock", dtype=torch.bfloat16)
        factors = random_factors(model)
        attach_factors(model, factors)
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(logits(loaded), logits(model))
        assert load(tmp_path, dtype=torch.float32).get_submodule(LAYER).weight_u.dtype == torch.float32

        rounded = factors[LAYER].dictionary.bfloat16(), factors[LAYER].coefficients.bfloat16()
        loaded.config.dtype = torch.float32  # as after `.to()`, which does not touch the config
        weight = loaded.dequantize().get_submodule(LAYER).weight
        assert torch.equal(weight, compose_weight(*rounded, torch.bfloat16))
        wide = load(tmp_path).dequantize(dtype=torch.float32)
        assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
        assert torch.equal(wide.get_submodule(LAYER).weight, compose_weight(*rounded, torch.float32))

    @pytest.mark.parametrize("make_factors", [mixed_factors, quantized_factors])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dequantizing_half_precision_gives_the_composed_weight(self, tmp_path, make_factors, dtype):
        FAMILIES["llama"]().save_pretrained(tmp_path / "stock")
        model = load(tmp_path / "stock", dtype=dtype)
        factors = make_factors(model)
        attach_factors(model, factors)
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(load_unpacked(tmp_path)), logits(model))
        loaded = load(tmp_path).dequantize()
        for name, one in factors.items():
            assert torch.equal(loaded.get_submodule(name).weight, dense_rows(as_stored(one, dtype), dtype)), name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("keep_packed", [None, False, True])
    def test_quantized_layers_compute_in_the_dtype_of_the_model(self, artifacts, tmp_path, dtype, keep_packed):
        _, folder = artifacts["llama, quantized"]
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["keep_packed"] = keep_packed
        factors = quantized_factors(FAMILIES["llama"]())
        loaded = load(folder, config=config, dtype=dtype)
        layers = stored_layers(loaded)
        codes = {name: one for name, one in factors.items() if isinstance(one, RoundedWeight)}
        assert len(codes) > 10
        for name, one in codes.items():
            assert torch.equal(layers[name].dense_weight(), one.weight(dtype).T)
        assert logits(loaded).dtype == dtype
        loaded.save_pretrained(tmp_path)
        saved, original = (load_file(each / "model.safetensors") for each in (tmp_path, folder))
        for key, tensor in original.items():
            assert torch.equal(saved[key], tensor if tensor.dtype == torch.uint8 else tensor.to(dtype)), key
        assert_same_logits(loaded.to(torch.float32), load_unpacked(tmp_path, dtype=torch.float32))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_bytes_on_the_disk_are_not_rounded(self, artifacts, tmp_path, dtype):
        _, folder = artifacts["llama, quantized"]
        device_map = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
        device_map |= {"model.layers.1": "disk", "lm_head": "cpu"}
        loaded = load_unpacked(folder, dtype=dtype, device_map=device_map, offload_folder=tmp_path)
        assert any(layer.offloaded for layer in stored_layers(loaded).values())
        assert torch.equal(logits(loaded), logits(load_unpacked(folder, dtype=dtype)))

    @pytest.mark.parametrize("name", ["llama", "llama, all kinds", "llama, quantized"])
    def test_loading_partly_onto_the_disk(self, name, artifacts, tmp_path):
        model, folder = artifacts[name]
        device_map = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
        device_map |= {"model.layers.1": "disk", "lm_head": "cpu"}
        loaded = load(folder, device_map=device_map, offload_folder=tmp_path / "offload")
        assert {name: layer.packed for name, layer in stored_layers(loaded).items()} == {
            name: ".layers.1." in name for name in stored_layers(model)
        }
        assert_same_logits(loaded, model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            loaded.save_pretrained(tmp_path / "saved")
        assert file_bytes(tmp_path / "saved") == file_bytes(folder)
        with pytest.raises(RocketError, match="offloaded"):
            loaded.dequantize()

    @pytest.mark.parametrize("name", ["llama", "llama, all kinds", "llama, quantized"])
    def test_layers_stay_packed_on_request(self, name, artifacts, tmp_path):
        model, folder = artifacts[name]
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["keep_packed"] = True
        loaded = load(folder, config=config)
        assert all(layer.packed for layer in stored_layers(loaded).values())
        assert torch.equal(logits(loaded), logits(model))
        loaded.save_pretrained(tmp_path)
        assert all(layer.packed for layer in stored_layers(load(tmp_path)).values())
        assert file_bytes(tmp_path) == file_bytes(folder)

    @pytest.mark.parametrize("elsewhere", ["q_proj", "k_proj"])
    @pytest.mark.parametrize("order", ["qkv", "vkq"])
    def test_loading_a_owner_or_a_follower_onto_the_disk(self, artifacts, elsewhere, order, tmp_path):
        model, folder = artifacts["llama, all kinds"]
        device_map = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
        device_map[f"model.layers.1.self_attn.{elsewhere}"] = "disk"
        loaded = load(folder, device_map=device_map, offload_folder=tmp_path)
        assert torch.equal(logits(loaded), logits(model))
        attention, expected = loaded.model.layers[1].self_attn, model.model.layers[1].self_attn
        assert attention.q_proj.weight_u.is_meta is (elsewhere == "q_proj")
        x = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
        for letter in order:
            name = f"{letter}_proj"
            assert torch.equal(attention.get_submodule(name)(x), expected.get_submodule(name)(x))
        with pytest.raises(RocketError, match="offloaded"):
            loaded.dequantize()
        if elsewhere == "q_proj":
            with pytest.raises(RocketError, match="offloaded"):
                attention.k_proj.weight + 0

    def test_an_offloaded_shared_dictionary_is_read_once(self, artifacts, tmp_path, monkeypatch):
        model, folder = artifacts["llama, all kinds"]
        device_map = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
        device_map["model.layers.1.self_attn.q_proj"] = "disk"
        attention = load(folder, device_map=device_map, offload_folder=tmp_path).model.layers[1].self_attn
        read = []
        pre_forward = attention.q_proj._hf_hook.pre_forward
        monkeypatch.setattr(
            attention.q_proj._hf_hook, "pre_forward", lambda *a, **k: read.append(1) or pre_forward(*a, **k)
        )
        x = torch.ones(3, HIDDEN_SIZE)
        with torch.no_grad():
            results = [attention.get_submodule(f"{letter}_proj")(x) for letter in "qkv"]
        assert len(read) == 1
        assert attention.q_proj._shared._entry is None
        expected = model.model.layers[1].self_attn
        for letter, result in zip("qkv", results, strict=True):
            assert torch.equal(result, expected.get_submodule(f"{letter}_proj")(x))

    def test_gradients_reach_the_input_of_an_offloaded_dictionary(self, artifacts, tmp_path):
        model, folder = artifacts["llama, all kinds"]
        device_map = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
        device_map["model.layers.1.self_attn.q_proj"] = "disk"
        loaded = load(folder, device_map=device_map, offload_folder=tmp_path)
        gradients = []
        for each in (loaded, model):
            x = torch.ones(3, HIDDEN_SIZE, requires_grad=True)
            each.model.layers[1].self_attn.k_proj(x).square().sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients)

    def test_a_shared_product_is_computed_once(self, artifacts, monkeypatch):
        loaded = load(artifacts["llama, all kinds"][1])
        inside = [layer for layer in stored_layers(loaded).values() if isinstance(layer, FactorizedLinear)]
        products = []

        class Counting:
            @staticmethod
            def linear(x, weight, bias=None):
                products.extend(
                    layer for layer in inside if layer.dictionary_owner is layer and layer.weight_u is weight
                )
                return torch.nn.functional.linear(x, weight, bias)

        monkeypatch.setattr(coefficient_linear, "functional", Counting)
        logits(loaded)
        assert len(products) == len(set(products)) < len(inside)
        assert set(products) == {layer.dictionary_owner for layer in inside}
        assert all(layer.dictionary_owner._shared._entry is None for layer in inside)

    def test_an_encoder_can_have_shared_dictionaries(self, tmp_path):
        config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
        model = BertModel(config).eval()
        factors = mixed_factors(model)
        owners = {one.dictionary_owner for one in factors.values()} - {None}
        assert owners == {f"encoder.layer.{index}.attention.self.query" for index in range(2)}
        attach_factors(model, factors)
        model.save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(tmp_path)
        expected = model(INPUT_IDS).last_hidden_state
        assert torch.equal(loaded(INPUT_IDS).last_hidden_state, expected)
        with_head = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert torch.equal(with_head.base_model(INPUT_IDS).last_hidden_state, expected)
        with_head.save_pretrained(tmp_path / "head")
        table = json.loads((tmp_path / "head" / "config.json").read_text())["quantization_config"]["layers"]
        assert {entry["dictionary"] for entry in table.values() if "dictionary" in entry} == {
            f"bert.{owner}" for owner in owners
        }
        dense = loaded.dequantize()
        torch.testing.assert_close(dense(INPUT_IDS).last_hidden_state, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["gemma", "gemma, quantized"])
    def test_tied_embeddings_stay_tied(self, artifacts, name):
        loaded = load(artifacts[name][1])
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    @pytest.mark.parametrize("name", ["llama", "llama, all kinds", "llama, quantized"])
    def test_the_device_map_leaves_room_for_unpacking(self, name, artifacts):
        folder = artifacts[name][1]
        packed = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
        prepared, dense = load(folder), load_unpacked(folder)
        on_cpu, elsewhere = (
            sum(tensor.nbytes for tensor in (*loaded.parameters(), *weights(loaded))) for loaded in (prepared, dense)
        )
        assert packed < 0.95 * elsewhere
        limits = {"cpu": 2e6, 0: 10**6}
        expected = {"cpu": int(2e6 * packed / elsewhere), 0: int(10**6 * packed / elsewhere)}
        assert dense.hf_quantizer.adjust_max_memory(limits) == expected
        found = prepared.hf_quantizer.adjust_max_memory(limits)
        assert found[0] == expected[0]
        # Entropy-coded layers reserve 8 bits for every code.
        assert 0.95 * 2e6 * packed / on_cpu < found["cpu"] <= 2e6 * packed / on_cpu

    def test_layers_compute_from_codes_on_a_cpu(self, artifacts, tmp_path):
        model, folder = artifacts["llama, quantized"]
        loaded = load(folder)
        quantized = {name: one for name, one in stored_layers(loaded).items() if isinstance(one, QuantizedLinear)}
        assert len(quantized) > 10
        assert all(layer.tabulated and layer.dense is None for layer in quantized.values())
        for tokens in (1, 3, 20):
            ids = torch.arange(tokens)[None]
            with torch.no_grad():
                torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        assert not any(getattr(one, "tabulated", False) for one in stored_layers(load_unpacked(folder)).values())
        loaded.save_pretrained(tmp_path)
        assert file_bytes(tmp_path) == file_bytes(folder)
        assert "keep_packed" not in json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        wide = load(folder, dtype=torch.float64)
        assert not any(getattr(one, "tabulated", False) for one in stored_layers(wide).values())

    @pytest.mark.parametrize("name", ["llama", "llama, quantized"])
    @pytest.mark.parametrize("keep_packed", [False, True])
    def test_layers_are_placed_by_the_memory_they_will_take(self, name, artifacts, tmp_path, keep_packed):
        folder = artifacts[name][1]
        dense = load_unpacked(folder)
        unpacked = sum(tensor.nbytes for tensor in (*dense.parameters(), *weights(dense)))
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["keep_packed"] = keep_packed
        options = {"max_memory": {"cpu": unpacked - 4000}, "offload_folder": tmp_path}
        loaded = load(folder, config=config, device_map="sequential", **options)
        devices = getattr(loaded, "hf_device_map", {"": "cpu"}).values()
        assert ("disk" in devices) is not keep_packed

    def test_loading_a_model_with_other_names_in_its_files(self, tmp_path):
        config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
        config.image_size, config.patch_size = 16, 8
        model = ViTModel(config, add_pooling_layer=False).eval()
        attach_factors(model, random_factors(model))
        table = model.config.quantization_config.layers
        assert "encoder.layer.0.attention.attention.query" in table
        assert "encoder.layer.0.attention.attention.query" not in stored_layers(model)
        model.save_pretrained(tmp_path)
        loaded = ViTModel.from_pretrained(tmp_path, add_pooling_layer=False)
        pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        assert torch.equal(loaded(pixels).last_hidden_state, model(pixels).last_hidden_state)

    def test_initialising_weights_afterwards_changes_nothing(self, artifacts):
        model, folder = artifacts["llama"]
        loaded = load(folder)
        loaded.init_weights()
        loaded.resize_token_embeddings(VOCAB_SIZE)
        assert torch.equal(logits(loaded), logits(model))
