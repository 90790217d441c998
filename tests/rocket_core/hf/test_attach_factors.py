import copy
import dataclasses

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from rocket_core.errors import (
    AlreadyQuantizedError,
    InvalidConfigError,
    RocketError,
    UnsupportedArchitectureError,
)
from rocket_core.hf import attach_factors, disk_names
from rocket_core.layers import LayerFactors
from tests.reference.factored_models import block_linears, logits, mixed_factors, random_factors, stored_layers
from tests.reference.tiny_models import FAMILIES

LAYER = "model.layers.1.mlp.up_proj"
OWNER = "model.layers.0.self_attn.q_proj"
FOLLOWER = "model.layers.0.self_attn.k_proj"
SPARSE = "model.layers.0.self_attn.o_proj"


class TestAttachFactors:
    @pytest.mark.parametrize("training", [False, True])
    def test_it_keeps_the_training_mode(self, training):
        model = FAMILIES["llama"]().train(training)
        attach_factors(model, random_factors(model))
        assert {module.training for module in model.modules()} == {training}

    def test_it_keeps_factors_attached_before(self):
        model = FAMILIES["llama"]()
        factors = random_factors(model)
        first = dict([factors.popitem()])
        attach_factors(attach_factors(model, first), factors)
        assert len(model.config.quantization_config.layers) == len(factors) + 1

    @pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj", "model.norm", "model.embed_tokens"])
    def test_a_name_without_a_linear_layer_is_refused(self, name):
        model = FAMILIES["llama"]()
        with pytest.raises(InvalidConfigError, match=name):
            attach_factors(model, {name: random_factors(model)[LAYER]})

    def test_factors_of_another_shape_are_refused(self):
        model = FAMILIES["llama"]()
        with pytest.raises(InvalidConfigError, match="down_proj"):
            attach_factors(model, {"model.layers.0.mlp.down_proj": random_factors(model)[LAYER]})
        assert not stored_layers(model)

    def test_quantized_models_are_refused(self):
        model = FAMILIES["llama"]()
        model.hf_quantizer = object()
        with pytest.raises(AlreadyQuantizedError):
            attach_factors(model, {})

    def test_layers_stored_in_parts_are_refused(self):
        config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, use_swiglu_ffn=True)
        model = Dinov2Model(config)
        names = [name for name in block_linears(model) if "mlp" in name]
        with pytest.raises(UnsupportedArchitectureError, match="mlp"):
            disk_names(model, names)

    @pytest.mark.parametrize(("name", "tensor"), [("llama", "coefficients"), ("llama, all kinds", "weight_u")])
    def test_a_copy_of_the_model_is_independent(self, artifacts, name, tensor):
        model, _ = artifacts[name]
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.get_submodule(OWNER).get_parameter(tensor).zero_()
        assert not torch.equal(logits(twin), logits(model))

    def test_factors_without_a_coefficient_are_refused(self):
        model = FAMILIES["llama"]()
        empty = LayerFactors(
            dictionary=None, coefficients=torch.zeros(32, 32), support=torch.zeros(32, 32, dtype=torch.bool)
        )
        with pytest.raises(InvalidConfigError, match=SPARSE):
            attach_factors(model, {SPARSE: empty})

    def test_a_dictionary_of_another_rank_is_refused(self):
        model = FAMILIES["llama"]()
        factors = LayerFactors(dictionary=torch.ones(32, 3), coefficients=torch.ones(4, 32))
        with pytest.raises(InvalidConfigError, match=SPARSE):
            attach_factors(model, {SPARSE: factors})


class TestSharedDictionaries:
    def test_they_can_use_a_owner_attached_before(self, artifacts):
        model = FAMILIES["llama"]()
        factors = mixed_factors(model)
        followers = {name: one for name, one in factors.items() if one.dictionary_owner is not None}
        attach_factors(model, {name: one for name, one in factors.items() if name not in followers})
        attach_factors(model, followers)
        assert torch.equal(logits(model), logits(artifacts["llama, all kinds"][0]))

    def test_they_can_be_given_in_any_order(self, artifacts):
        model = FAMILIES["llama"]()
        attach_factors(model, dict(reversed(mixed_factors(model).items())))
        assert torch.equal(logits(model), logits(artifacts["llama, all kinds"][0]))

    @pytest.mark.parametrize("owner", ["model.layers.9.mlp.up_proj", FOLLOWER, SPARSE, LAYER])
    def test_they_need_a_owner_with_a_dictionary(self, owner):
        model = FAMILIES["llama"]()
        factors = mixed_factors(model)
        factors[FOLLOWER] = dataclasses.replace(factors[FOLLOWER], dictionary_owner=owner)
        with pytest.raises(InvalidConfigError, match=f"{FOLLOWER}.*{owner}"):
            attach_factors(model, factors)
        assert not stored_layers(model)

    def test_they_cannot_use_the_dictionary_of_a_follower(self):
        model = FAMILIES["llama"]()
        factors = mixed_factors(model)
        last = dataclasses.replace(factors.pop(FOLLOWER), dictionary_owner=LAYER)
        attach_factors(model, factors)
        with pytest.raises(InvalidConfigError, match=f"{FOLLOWER}.*{LAYER}"):
            attach_factors(model, {FOLLOWER: last})

    def test_a_different_dictionary_than_the_owners_is_refused(self):
        model = FAMILIES["llama"]()
        factors = mixed_factors(model)
        factors[FOLLOWER] = dataclasses.replace(factors[FOLLOWER], dictionary=factors[OWNER].dictionary * 2)
        with pytest.raises(InvalidConfigError, match=f"{FOLLOWER}.*another dictionary than '{OWNER}'"):
            attach_factors(model, factors)

    def test_they_cannot_be_saved_without_the_owner(self, artifacts, tmp_path):
        model = copy.deepcopy(artifacts["llama, all kinds"][0])
        expected = logits(model)
        owner = model.get_submodule(OWNER)
        stock = torch.nn.Linear(owner.in_features, owner.out_features, bias=False)
        stock.weight = torch.nn.Parameter(owner.dense_weight())
        model.set_submodule(OWNER, stock)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(RocketError, match=f"{FOLLOWER}.*{OWNER}"):
            model.save_pretrained(tmp_path)
