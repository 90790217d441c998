"""Encoder-decoders whose encoder, decoder and head use one quantized table."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from rocket_core.hf import attach_factors
from rocket_core.layers import QuantizedEmbedding, QuantizedLinear, TiedEmbedding, TiedLinear
from tests.reference.factored_models import dense_rows, embedding_codes, file_bytes, quantized_factors
from tests.reference.sequence_models import (
    TEXT,
    build_sequence_model,
    inputs_of,
    load_sequence_model,
    sequence_logits,
)

FAMILIES = (*TEXT, "whisper")


@pytest.fixture(scope="module", params=FAMILIES)
def artifact(request, tmp_path_factory):
    """Return a family, its compressed model, the dense model that equals it but for its blocks, and the folder."""
    model, dense = build_sequence_model(request.param), build_sequence_model(request.param)
    codes = embedding_codes(model)
    for name, rounded in codes.items():
        dense.get_submodule(name).weight.data.copy_(dense_rows(rounded, torch.float32))
    attach_factors(dense, quantized_factors(model))
    attach_factors(model, codes | quantized_factors(model))
    folder = tmp_path_factory.mktemp("artifacts") / request.param
    model.save_pretrained(folder)
    return request.param, model, dense, folder


def test_logits_are_those_of_the_rounded_table(artifact):
    family, model, dense, _ = artifact
    assert torch.equal(sequence_logits(model, family), sequence_logits(dense, family))


@pytest.mark.parametrize("keep_packed", [None, True, False])
def test_loaded_logits_equal_those_in_memory(artifact, keep_packed):
    family, model, _, folder = artifact
    if keep_packed and family in ("t5", "mt5"):
        pytest.skip(
            "T5 casts what some layers read to the dtype of their weights, which layers with packed codes refuse"
        )
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["keep_packed"] = keep_packed
    config = type(model.config).from_dict(settings)
    loaded, report = load_sequence_model(folder, config=config, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(sequence_logits(loaded, family), sequence_logits(model, family), rtol=1e-5, atol=1e-5)


def test_every_use_of_the_table_has_the_same_tensors(artifact):
    family, _, _, folder = artifact
    loaded = load_sequence_model(folder)
    embeddings = [module for module in loaded.modules() if isinstance(module, QuantizedEmbedding)]
    assert len(embeddings) == (1 if family == "whisper" else 3)
    assert len({(one.weight.data_ptr(), one.weight_scale.data_ptr()) for one in embeddings}) == 1
    head = loaded.get_output_embeddings()
    assert type(head) is (QuantizedLinear if family == "mt5" else TiedLinear)
    stored = [
        key for key in load_file(folder / "model.safetensors") if key.endswith(("embed_tokens.weight", "shared.weight"))
    ]
    assert len(stored) == 1


def test_saving_writes_the_bytes_that_were_loaded(artifact, tmp_path):
    family, _, _, folder = artifact
    loaded = load_sequence_model(folder)
    loaded.save_pretrained(tmp_path / family)
    assert file_bytes(tmp_path / family) == file_bytes(folder)


def test_a_copy_uses_its_own_table(artifact):
    family, model, _, folder = artifact
    loaded = load_sequence_model(folder)
    copied = copy.deepcopy(loaded)
    modules = dict(copied.named_modules())
    for name, module in modules.items():
        if isinstance(module, TiedEmbedding):
            assert module.embedding in modules.values(), name
    torch.testing.assert_close(sequence_logits(copied, family), sequence_logits(model, family), rtol=1e-5, atol=1e-5)


def test_it_generates_as_the_dense_model_does(artifact):
    family, _, dense, folder = artifact
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    loaded = load_sequence_model(folder)
    assert torch.equal(*(one.generate(**inputs_of(family), **options) for one in (loaded, dense)))


def test_dequantizing_ties_stock_layers_again(artifact, tmp_path):
    family, _, dense, folder = artifact
    loaded = load_sequence_model(folder).dequantize()
    embeddings = [module for name, module in loaded.named_modules() if name.endswith(("embed_tokens", "shared"))]
    assert not any(isinstance(one, QuantizedEmbedding) for one in embeddings)
    assert len({one.weight.data_ptr() for one in embeddings}) == 1
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (family != "mt5")
    loaded.save_pretrained(tmp_path / family)
    found = sequence_logits(load_sequence_model(tmp_path / family), family)
    torch.testing.assert_close(found, sequence_logits(dense, family), rtol=1e-4, atol=1e-4)


def test_a_dense_head_of_its_own_is_kept(tmp_path):
    model = build_sequence_model("mt5")
    dense = copy.deepcopy(model)
    codes = {"shared": embedding_codes(model)["shared"]}
    dense.shared.weight.data.copy_(dense_rows(codes["shared"], torch.float32))
    attach_factors(model, codes)
    model.save_pretrained(tmp_path)
    loaded = load_sequence_model(tmp_path)
    assert type(loaded.lm_head) is torch.nn.Linear
    torch.testing.assert_close(sequence_logits(loaded, "mt5"), sequence_logits(dense, "mt5"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embeddings_multiply_as_the_stock_class_does(dtype):
    model = build_sequence_model("bart").to(dtype)
    codes = {"model.shared": embedding_codes(model)["model.shared"]}
    dense = copy.deepcopy(model)
    dense.model.shared.weight.data.copy_(dense_rows(codes["model.shared"], dtype))
    attach_factors(model, codes)
    tokens = torch.arange(300)[None]
    expected = dense.model.encoder.embed_tokens
    assert expected.embed_scale != 1
    assert torch.equal(model.model.encoder.embed_tokens(tokens), expected(tokens))
