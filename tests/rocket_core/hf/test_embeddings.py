import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaForCausalLM

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError, InvalidConfigError, RocketError
from rocket_core.hf import attach_factors
from rocket_core.layers import LayerFactors, QuantizedEmbedding, QuantizedLinear, TiedLinear
from tests.reference.factored_models import (
    INPUT_IDS,
    dense_rows,
    embedding_codes,
    file_bytes,
    load,
    load_unpacked,
    logits,
    quantized_factors,
)
from tests.reference.tiny_models import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE


def build_tied_llama():
    config = FAMILIES["llama"]().config.to_dict() | {"tie_word_embeddings": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**config)).eval()


BUILD = {
    "untied": FAMILIES["llama"],
    "tied": build_tied_llama,
    "gpt2": FAMILIES["gpt2"],
    "opt": FAMILIES["opt"],
    "gemma": FAMILIES["gemma"],
}


@pytest.fixture(scope="module", params=BUILD)
def artifact(request, tmp_path_factory):
    """Return a model with quantized embeddings in memory, the dense model that equals it, and the saved folder."""
    model, dense = BUILD[request.param](), BUILD[request.param]()
    codes = embedding_codes(model) | quantized_factors(model)
    for name in embedding_codes(model):
        dense.get_submodule(name).weight.data.copy_(dense_rows(codes[name], torch.float32))
    attach_factors(dense, quantized_factors(model))
    attach_factors(model, codes)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, dense, folder


class TestQuantizedEmbeddings:
    def test_logits_are_those_of_the_rounded_table(self, artifact):
        model, dense, _ = artifact
        assert torch.equal(logits(model), logits(dense))

    def test_loaded_logits_equal_those_in_memory(self, artifact):
        model, _, folder = artifact
        for loaded, report in (load(folder, output_loading_info=True), load_unpacked(folder, output_loading_info=True)):
            assert not any(report.values())
            torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)

    def test_the_layers_are_of_the_expected_kinds(self, artifact):
        model, _, folder = artifact
        loaded = load(folder)
        tied = model.config.tie_word_embeddings
        assert type(loaded.get_input_embeddings()) is QuantizedEmbedding
        assert type(loaded.get_output_embeddings()) is (TiedLinear if tied else QuantizedLinear)
        assert loaded.get_output_embeddings().tabulated
        assert loaded.get_input_embeddings().weight.dtype == torch.uint8
        kept = sum(parameter.nbytes for parameter in loaded.get_input_embeddings().parameters())
        assert kept < 0.4 * 2 * VOCAB_SIZE * HIDDEN_SIZE

    def test_a_tied_table_is_stored_once(self, artifact):
        model, _, folder = artifact
        table = json.loads((folder / "config.json").read_text())["quantization_config"]["layers"]
        tensors = load_file(folder / "model.safetensors")
        names = embedding_codes(build_of(model)).keys()
        assert len(names) == (1 if model.config.tie_word_embeddings else 2)
        assert {name for name in table if table[name].get("bits") and name in names} == names
        assert ("lm_head.weight" in tensors) is ("lm_head" in names)
        for name in names:
            assert tensors[f"{name}.weight"].shape == (VOCAB_SIZE * HIDDEN_SIZE * table[name]["bits"] // 8,)

    def test_saving_writes_the_bytes_that_were_loaded(self, artifact, tmp_path):
        _, _, folder = artifact
        for number, loaded in enumerate((load(folder), load_unpacked(folder))):
            loaded.tie_weights()
            loaded.save_pretrained(tmp_path / str(number))
            assert file_bytes(tmp_path / str(number)) == file_bytes(folder)

    def test_generation_gives_the_same_tokens(self, artifact):
        model, _, folder = artifact
        tokens = [
            each.generate(INPUT_IDS[:1, :8], max_new_tokens=12, do_sample=False) for each in (model, load(folder))
        ]
        assert torch.equal(*tokens)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_models_load_in_other_dtypes(self, artifact, dtype):
        model, _, folder = artifact
        loaded = load(folder, dtype=dtype)
        assert logits(loaded).dtype == dtype
        for table in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
            expected = model.get_submodule(table.layer_name).dense_weight(dtype)
            assert torch.equal(table.dense_weight(), expected)

    def test_resizing_needs_a_dequantized_table(self, artifact):
        model, _, folder = artifact
        loaded = load(folder)
        for same in ({"new_num_tokens": VOCAB_SIZE}, {}, {"pad_to_multiple_of": 64}):
            assert loaded.resize_token_embeddings(**same) is loaded.get_input_embeddings()
        for other in ({"new_num_tokens": VOCAB_SIZE + 2}, {"pad_to_multiple_of": 128}):
            with pytest.raises(RocketError, match=r"cannot be resized; call model\.dequantize\(\) first"):
                loaded.resize_token_embeddings(**other)
        assert loaded.config.vocab_size == VOCAB_SIZE
        assert torch.equal(logits(loaded), logits(load(folder)))
        resized = loaded.dequantize()
        resized.resize_token_embeddings(VOCAB_SIZE + 2)
        assert logits(resized).shape[-1] == VOCAB_SIZE + 2
        torch.testing.assert_close(logits(resized)[..., :VOCAB_SIZE], logits(model), rtol=1e-4, atol=1e-4)

    def test_dequantizing_gives_stock_layers(self, artifact, tmp_path):
        model, dense, folder = artifact
        loaded = load(folder).dequantize()
        head, embedding = loaded.get_output_embeddings(), loaded.get_input_embeddings()
        assert (type(head), type(embedding)) == (torch.nn.Linear, type(build_of(model).get_input_embeddings()))
        assert (head.weight is embedding.weight) is bool(model.config.tie_word_embeddings)
        assert torch.equal(embedding.weight, dense.get_input_embeddings().weight)
        loaded.save_pretrained(tmp_path)
        torch.testing.assert_close(logits(load(tmp_path)), logits(dense), rtol=1e-4, atol=1e-4)

    def test_the_base_model_can_be_loaded_and_saved(self, artifact, tmp_path):
        model, _, folder = artifact
        base = AutoModel.from_pretrained(folder)
        base.save_pretrained(tmp_path)
        expected = model.base_model(INPUT_IDS).last_hidden_state
        found = AutoModel.from_pretrained(tmp_path)(INPUT_IDS).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_loading_the_table_onto_the_disk(self, artifact, tmp_path):
        model, _, folder = artifact
        leaves = [name for name, module in model.named_modules() if not list(module.children())]
        device_map = dict.fromkeys(leaves, "cpu")
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            device_map[table.layer_name] = "disk"
        loaded = load(folder, device_map=device_map, offload_folder=tmp_path)
        assert loaded.get_input_embeddings().offloaded
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
        with pytest.raises(RocketError, match="offloaded"):
            loaded.dequantize()

    def test_the_device_map_leaves_room_for_preparing(self, artifact):
        _, _, folder = artifact
        packed = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
        loaded = load(folder)
        prepared = sum(parameter.nbytes for parameter in loaded.parameters())
        limit = loaded.hf_quantizer.adjust_max_memory({"cpu": 10**6})["cpu"]
        # Entropy-coded layers reserve 8 bits for every code.
        assert 0.75 * 10**6 * packed / prepared < limit <= 10**6 * packed / prepared

    def test_a_tied_head_adds_nothing_in_memory(self, artifact):
        model, _, folder = artifact
        loaded = load(folder)
        head, embedding = loaded.get_output_embeddings(), loaded.get_input_embeddings()
        if model.config.tie_word_embeddings:
            assert head.codes is embedding.weight
            assert head.weight_scale is embedding.weight_scale
        assert not [name for name, _ in head.named_buffers()]


def build_of(model):
    """Return the stock model that was compressed."""
    return next(build() for build in BUILD.values() if type(build()) is type(model) and same_ties(build(), model))


def same_ties(one, other):
    return bool(one.config.tie_word_embeddings) == bool(other.config.tie_word_embeddings)


class TestRefusals:
    def test_an_embedding_can_only_be_quantized(self, tmp_path):
        model = FAMILIES["llama"]()
        coefficients = torch.ones(HIDDEN_SIZE, VOCAB_SIZE)
        factors = LayerFactors(dictionary=None, coefficients=coefficients, support=coefficients > 0)
        with pytest.raises(CheckpointFormatError, match="embedding, which can only be quantized"):
            attach_factors(model, {"model.embed_tokens": factors})

    def test_an_embedding_of_another_class_is_refused(self):
        class Shifted(torch.nn.Embedding):
            def forward(self, tokens):
                return super().forward(tokens) + 1

        model = FAMILIES["llama"]()
        codes = embedding_codes(model)
        model.set_input_embeddings(Shifted(VOCAB_SIZE, HIDDEN_SIZE))
        with pytest.raises(InvalidConfigError, match=r"no linear layer or embedding 'model\.embed_tokens'"):
            attach_factors(model, codes)

    def test_a_head_that_is_missing_in_its_own_class_is_refused(self, tmp_path):
        model = FAMILIES["llama"]()
        attach_factors(model, embedding_codes(model))
        model.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        layers = config.quantization_config["layers"]
        layers["head"] = layers.pop("lm_head")
        with pytest.raises(CheckpointFormatError, match="'head'"):
            load(tmp_path, config=config)

    def test_a_table_that_config_json_does_not_list_is_refused(self, tmp_path):
        model = FAMILIES["gpt2"]()
        attach_factors(model, embedding_codes(model) | quantized_factors(model))
        model.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        del config.quantization_config["layers"]["transformer.wte"]
        with pytest.raises(CorruptCheckpointError, match=r"transformer\.wte"):
            load(tmp_path, config=config)
