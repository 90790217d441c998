"""Artifacts whose coefficients and atoms are integer codes: loading, saving, casting, offloading, adapters."""

import peft
import pytest
import torch

from rocket_core.hf import attach_factors
from rocket_core.layers import CodedLinear
from tests.reference.factored_models import (
    FAMILIES,
    INPUT_IDS,
    coded_values,
    file_bytes,
    load,
    load_unpacked,
    logits,
    stored_layers,
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Return the folder of a model with coded values of every kind, saved from memory."""
    folder = tmp_path_factory.mktemp("coded") / "llama"
    model = FAMILIES["llama"]()
    attach_factors(model, coded_values(model)).save_pretrained(folder)
    return folder


def test_packed_and_unpacked_layers_compute_the_same(artifact):
    packed = load(artifact)
    coded = [layer for layer in stored_layers(packed).values() if isinstance(layer, CodedLinear)]
    assert len(coded) == len(stored_layers(packed)) > 8
    unpacked = logits(load_unpacked(artifact))
    assert torch.equal(logits(packed), unpacked)
    packed.config.quantization_config.keep_packed = True
    packed.save_pretrained(artifact.parent / "kept")
    kept = load(artifact.parent / "kept")
    assert all(layer.packed for layer in stored_layers(kept).values())
    assert torch.equal(logits(kept), unpacked)


def test_a_loaded_model_is_saved_to_the_same_bytes(artifact, tmp_path):
    load(artifact).save_pretrained(tmp_path)
    assert file_bytes(tmp_path) == file_bytes(artifact)


def test_another_dtype_rounds_the_numbers_once(artifact):
    half = load(artifact, dtype=torch.bfloat16)
    for name, layer in stored_layers(load(artifact)).items():
        twin = stored_layers(half)[name]
        assert twin.dtype == torch.bfloat16
        torch.testing.assert_close(twin.dense_weight(torch.float32), layer.dense_weight(), rtol=0.05, atol=0.05)
    cast = stored_layers(load(artifact).to(torch.bfloat16))
    for name, layer in stored_layers(half).items():
        assert torch.equal(cast[name].dense_weight(), layer.dense_weight())


def test_an_offloaded_model_computes_the_same(artifact, tmp_path):
    offloaded = load(artifact, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    torch.testing.assert_close(logits(offloaded), logits(load(artifact)), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_can_be_trained_on_top(artifact):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
    model = peft.get_peft_model(load(artifact), config)
    loss = model(INPUT_IDS, labels=INPUT_IDS).loss
    loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)
