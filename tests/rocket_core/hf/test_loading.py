import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, ViTConfig, ViTModel

from rocket_core.errors import RocketError
from rocket_core.hf import attach_factors
from rocket_core.modules import compose_weight
from tests.reference.factored_models import file_bytes, load, logits, random_factors, stored_layers
from tests.reference.tiny_models import FAMILIES, VOCAB_SIZE

LAYER = "model.layers.1.mlp.up_proj"


class TestLoading:
    @pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
    def test_onto_a_device_map(self, artifacts, device_map):
        model, folder = artifacts["llama"]
        assert torch.equal(logits(load(folder, device_map=device_map)), logits(model))

    def test_in_shards(self, artifacts, tmp_path):
        model, folder = artifacts["gpt2"]
        load(folder).save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        loaded = load(tmp_path)
        assert torch.equal(logits(loaded), logits(model))
        loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
        assert file_bytes(tmp_path / "again") == file_bytes(tmp_path)

    def test_in_half_precision(self, tmp_path):
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

    def test_partly_onto_the_disk(self, artifacts, tmp_path):
        model, folder = artifacts["llama"]
        device_map = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
        device_map |= {"model.layers.1": "disk", "lm_head": "cpu"}
        loaded = load(folder, device_map=device_map, offload_folder=tmp_path / "offload")
        assert {name: layer.packed for name, layer in stored_layers(loaded).items()} == {
            name: ".layers.1." in name for name in stored_layers(model)
        }
        assert torch.equal(logits(loaded), logits(model))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            loaded.save_pretrained(tmp_path / "saved")
        assert file_bytes(tmp_path / "saved") == file_bytes(folder)
        with pytest.raises(RocketError, match="offloaded"):
            loaded.dequantize()

    def test_kept_packed_on_request(self, artifacts, tmp_path):
        model, folder = artifacts["llama"]
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["keep_packed"] = True
        loaded = load(folder, config=config)
        assert all(layer.packed for layer in stored_layers(loaded).values())
        assert torch.equal(logits(loaded), logits(model))
        loaded.save_pretrained(tmp_path)
        assert all(layer.packed for layer in stored_layers(load(tmp_path)).values())
        assert file_bytes(tmp_path) == file_bytes(folder)

    def test_tied_embeddings_stay_tied(self, artifacts):
        loaded = load(artifacts["gemma"][1])
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    def test_leaves_room_for_unpacking(self, artifacts):
        loaded = load(artifacts["llama"][1])
        unpacked = sum(parameter.nbytes for parameter in loaded.parameters())
        packed = sum(tensor.nbytes for tensor in load_file(artifacts["llama"][1] / "model.safetensors").values())
        assert packed < 0.95 * unpacked
        limits = loaded.hf_quantizer.adjust_max_memory({"cpu": 2e6, 0: 10**6})
        assert limits == {"cpu": int(2e6 * packed / unpacked), 0: int(10**6 * packed / unpacked)}

    @pytest.mark.parametrize("keep_packed", [False, True])
    def test_spreads_over_devices_by_the_memory_it_will_take(self, artifacts, tmp_path, keep_packed):
        folder = artifacts["llama"][1]
        unpacked = sum(parameter.nbytes for parameter in load(folder).parameters())
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["keep_packed"] = keep_packed
        options = {"max_memory": {"cpu": unpacked - 4000}, "offload_folder": tmp_path}
        loaded = load(folder, config=config, device_map="sequential", **options)
        devices = getattr(loaded, "hf_device_map", {"": "cpu"}).values()
        assert ("disk" in devices) is not keep_packed

    def test_where_files_have_other_names_than_modules(self, tmp_path):
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
