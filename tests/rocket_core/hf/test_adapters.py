import peft
import pytest
import torch

from rocket_core.errors import RocketError
from tests.reference.factored_models import INPUT_IDS, load, logits, stored_layers


@pytest.fixture(params=["llama", "gpt2", "llama, all kinds", "gpt2, all kinds", "llama, quantized", "gpt2, quantized"])
def adapted(request, artifacts):
    """Return a loaded artifact with fresh adapters on all linear layers, and its folder."""
    model = load(artifacts[request.param][1])
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config), artifacts[request.param][1]


# peft asks for a property that transformers has renamed, and nothing sets `fan_in_fan_out`.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out is set to True but the target module is `torch.nn.Linear`:UserWarning"
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
class TestLora:
    def test_a_training_step_changes_only_the_adapters(self, adapted):
        model, _ = adapted
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        model.train()
        model(INPUT_IDS, labels=INPUT_IDS).loss.backward()
        optimizer.step()
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert changed == {name for name in before if "lora_" in name}
        assert changed

    def test_every_kind_of_layer_gets_an_adapter(self, adapted):
        model, folder = adapted
        adapted_layers = {type(module.base_layer) for module in model.modules() if hasattr(module, "base_layer")}
        assert {type(layer) for layer in stored_layers(load(folder)).values()} <= adapted_layers

    def test_adapters_can_be_saved_and_loaded(self, adapted, tmp_path):
        model, folder = adapted
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(peft.PeftModel.from_pretrained(load(folder), tmp_path)), logits(model))
        assert torch.equal(logits(load(tmp_path)), logits(model))

    @pytest.mark.parametrize("safe_merge", [False, True])
    def test_merging_into_factors_is_refused(self, adapted, safe_merge):
        model, _ = adapted
        with pytest.raises(RocketError, match=r"call model\.dequantize\(\) first"):
            model.merge_and_unload(safe_merge=safe_merge)

    def test_merging_into_dequantized_layers_works(self, adapted, tmp_path):
        model, folder = adapted
        expected = logits(model)
        model.save_pretrained(tmp_path)
        merged = peft.PeftModel.from_pretrained(load(folder).dequantize(), tmp_path).merge_and_unload()
        assert not stored_layers(merged)
        torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)
