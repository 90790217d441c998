"""Masked language models whose token embedding is quantized, with heads that have biases and are tied to it."""

import copy
import json

import pytest
import torch

from rocket_core.hf import attach_factors
from rocket_core.layers import QuantizedEmbedding, TiedLinear
from tests.reference.factored_models import dense_rows, embedding_codes, file_bytes, logits, quantized_factors
from tests.reference.masked_models import MASKED, build_masked, load_masked
from tests.reference.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module", params=MASKED)
def artifact(request, tmp_path_factory):
    """Return a compressed model in memory, the dense model that equals it but for its blocks, and the saved folder."""
    model, dense = build_masked(request.param), build_masked(request.param)
    codes = embedding_codes(model) | quantized_factors(model)
    for name in embedding_codes(model):
        dense.get_submodule(name).weight.data.copy_(dense_rows(codes[name], torch.float32))
    attach_factors(dense, quantized_factors(model))
    attach_factors(model, codes)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, dense, folder


def test_logits_are_those_of_the_rounded_table(artifact):
    model, dense, _ = artifact
    assert torch.equal(logits(model), logits(dense))


@pytest.mark.parametrize("keep_packed", [None, True, False])
def test_loaded_logits_equal_those_in_memory(artifact, keep_packed, tmp_path):
    model, _, folder = artifact
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["keep_packed"] = keep_packed
    config = type(model.config).from_dict(settings)
    loaded, report = load_masked(folder, config=config, output_loading_info=True)
    assert not any(report.values())
    assert loaded.get_output_embeddings().bias.shape == (VOCAB_SIZE,)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


def test_saving_writes_the_bytes_that_were_loaded(artifact, tmp_path):
    _, _, folder = artifact
    loaded = load_masked(folder)
    loaded.tie_weights()
    assert type(loaded.get_input_embeddings()) is QuantizedEmbedding
    assert type(loaded.get_output_embeddings()) is TiedLinear
    loaded.save_pretrained(tmp_path)
    assert file_bytes(tmp_path) == file_bytes(folder)


def test_a_copy_ties_its_own_weights(artifact):
    model, _, folder = artifact
    loaded = load_masked(folder)
    copied = copy.deepcopy(loaded)
    copied.tie_weights()
    assert copied.get_output_embeddings().embedding is copied.get_input_embeddings()
    assert copied.get_output_embeddings().embedding is not loaded.get_input_embeddings()
    torch.testing.assert_close(logits(copied), logits(model), rtol=1e-5, atol=1e-5)


def test_dequantizing_gives_a_stock_head_with_its_bias(artifact, tmp_path):
    model, dense, folder = artifact
    loaded = load_masked(folder).dequantize()
    head = loaded.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(head.bias, model.get_output_embeddings().bias)
    loaded.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_masked(tmp_path)), logits(dense), rtol=1e-4, atol=1e-4)
