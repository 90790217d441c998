import copy

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from rocket_core.errors import AlreadyQuantizedError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.hf import attach_factors, disk_names
from tests.reference.factored_models import block_linears, logits, random_factors, stored_layers
from tests.reference.tiny_models import FAMILIES

LAYER = "model.layers.1.mlp.up_proj"


class TestAttachFactors:
    @pytest.mark.parametrize("training", [False, True])
    def test_keeps_the_mode_of_the_model(self, training):
        model = FAMILIES["llama"]().train(training)
        attach_factors(model, random_factors(model))
        assert {module.training for module in model.modules()} == {training}

    def test_keeps_other_factors(self):
        model = FAMILIES["llama"]()
        factors = random_factors(model)
        first = dict([factors.popitem()])
        attach_factors(attach_factors(model, first), factors)
        assert len(model.config.quantization_config.layers) == len(factors) + 1

    @pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj", "model.norm", "model.embed_tokens"])
    def test_needs_a_linear_layer(self, name):
        model = FAMILIES["llama"]()
        with pytest.raises(InvalidConfigError, match=name):
            attach_factors(model, {name: random_factors(model)[LAYER]})

    def test_needs_the_shape_of_the_layer(self):
        model = FAMILIES["llama"]()
        with pytest.raises(InvalidConfigError, match="down_proj"):
            attach_factors(model, {"model.layers.0.mlp.down_proj": random_factors(model)[LAYER]})
        assert not stored_layers(model)

    def test_needs_plain_weights(self):
        model = FAMILIES["llama"]()
        model.hf_quantizer = object()
        with pytest.raises(AlreadyQuantizedError):
            attach_factors(model, {})

    def test_layers_that_files_hold_in_pieces_are_refused(self):
        config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, use_swiglu_ffn=True)
        model = Dinov2Model(config)
        names = [name for name in block_linears(model) if "mlp" in name]
        with pytest.raises(UnsupportedArchitectureError, match="mlp"):
            disk_names(model, names)

    def test_a_copy_of_the_model_is_independent(self, artifacts):
        model, _ = artifacts["llama"]
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.get_submodule(LAYER).coefficients.zero_()
        assert not torch.equal(logits(twin), logits(model))
