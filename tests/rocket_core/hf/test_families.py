import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel
from transformers.pytorch_utils import Conv1D

from rocket_core.hf import disk_names
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.sizes import budget
from tests.reference.factored_models import (
    ARTIFACTS,
    INPUT_IDS,
    block_linears,
    dense_rows,
    file_bytes,
    load,
    logits,
    stored_layers,
)


def stock_and_factors(name):
    """Return the model that was compressed, and its factors."""
    build, make_factors = ARTIFACTS[name]
    stock = build()
    return stock, make_factors(stock)


@pytest.mark.parametrize("family", ARTIFACTS)
class TestEveryFamily:
    def test_loaded_logits_equal_those_in_memory(self, artifacts, family):
        model, folder = artifacts[family]
        loaded, report = load(folder, output_loading_info=True)
        stock, factors = stock_and_factors(family)
        assert stored_layers(loaded).keys() == factors.keys()
        assert not any(report.values())
        assert torch.equal(logits(loaded), logits(model))
        assert not torch.allclose(logits(loaded), logits(stock))

    def test_saving_writes_the_bytes_that_were_loaded(self, artifacts, family, tmp_path):
        _, folder = artifacts[family]
        load(folder).save_pretrained(tmp_path)
        assert file_bytes(tmp_path) == file_bytes(folder)
        assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()

    def test_generation_gives_the_same_tokens(self, artifacts, family):
        model, folder = artifacts[family]
        tokens = [
            each.generate(INPUT_IDS[:1, :8], max_new_tokens=12, do_sample=False, cache_implementation=cache)
            for each, cache in ((model, None), (load(folder), None), (load(folder), "static"))
        ]
        assert torch.equal(tokens[0], tokens[1])
        assert torch.equal(tokens[0], tokens[2])

    def test_files_contain_what_the_table_says(self, artifacts, family):
        _, folder = artifacts[family]
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        tensors = load_file(folder / "model.safetensors")
        assert {key: value for key, value in config.items() if key != "layers"} == {
            "quant_method": "rocket",
            "format_version": 3 if "quantized" in family or "values" in family else 2 if "all kinds" in family else 1,
        }
        stock, factors = stock_and_factors(family)
        disk = disk_names(stock, factors)
        assert config["layers"].keys() == set(disk.values())
        for name, one in factors.items():
            entry, stem = config["layers"][disk[name]], disk[name]
            if isinstance(one, RoundedWeight):
                assert entry == entry_of_codes(one, tensors[f"{stem}.weight"])
                parts = {key for key in tensors if key.startswith(f"{stem}.")} - {f"{stem}.bias"}
                assert parts == {f"{stem}.weight", f"{stem}.weight_scale"}
                assert {(tensors[key].dtype, tensors[key].ndim) for key in parts} == {(torch.uint8, 1)}
                continue
            stored = one.coefficients.numel() if one.support is None else int(one.support.sum())
            expected = {"nnz": stored}
            if one.dictionary is not None:
                expected["rank"] = one.dictionary.shape[1]
            if one.dictionary_owner is not None:
                expected["dictionary"] = disk[one.dictionary_owner]
            weight_bytes = stored
            if one.value_codes:
                [values] = one.value_codes
                expected |= entry_of_codes(values, None)
                weight_bytes = budget.packed_bytes(stored, values.scales.format.bits)
                if "dictionary" not in expected and one.dictionary is not None:
                    expected["dictionary_exponent"] = one.dictionary_codes.scales.exponent
            assert entry == expected
            assert tensors[f"{stem}.weight"].shape == (weight_bytes,)
            owns = one.dictionary is not None and one.dictionary_owner is None
            assert (f"{stem}.weight_u" in tensors) is owns
            mask = tensors.get(f"{stem}.weight_mask")
            assert (mask is None) is (one.dictionary is not None and one.support is None)
            assert mask is None or int(mask.view(-1, 1).bitwise_and(2 ** torch.arange(8)).ne(0).sum()) == stored

    def test_dequantizing_gives_stock_layers(self, artifacts, family, tmp_path):
        stock, factors = stock_and_factors(family)
        model = load(artifacts[family][1]).dequantize()
        for name, module in block_linears(model).items():
            weight = stock.get_submodule(name).weight
            assert isinstance(stock.get_submodule(name), type(module))
            if name in factors:
                weight = dense_rows(factors[name], torch.float32)
                weight = weight.T if type(module) is Conv1D else weight
            assert torch.equal(module.weight, weight)
        assert not stored_layers(model)
        torch.testing.assert_close(logits(model), logits(artifacts[family][0]), rtol=1e-4, atol=1e-4)
        model.save_pretrained(tmp_path)
        assert (tmp_path / "config.json").read_text() == saved_config(stock, tmp_path)

    def test_the_base_model_can_be_loaded_and_saved(self, artifacts, family, tmp_path):
        model, folder = artifacts[family]
        base = AutoModel.from_pretrained(folder)
        base.save_pretrained(tmp_path)
        reloaded = AutoModel.from_pretrained(tmp_path)
        expected = model.base_model(INPUT_IDS).last_hidden_state
        assert torch.equal(reloaded(INPUT_IDS).last_hidden_state, expected)
        table = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"]
        tensors = load_file(tmp_path / "model.safetensors")
        for name, entry in table.items():
            layer = stored_layers(base)[next(each for each in stored_layers(base) if name.endswith(each))]
            numbers = layer.in_features * layer.out_features
            codes = entry.get("nnz", numbers)
            packed = budget.packed_bytes(codes, entry["bits"]) if "bits" in entry else codes
            stored = entry.get("coded_bytes") or packed
            assert tensors[f"{name}.weight"].shape == (stored,)
        assert all(
            f"{entry.get('dictionary', name)}.weight_u" in tensors for name, entry in table.items() if "rank" in entry
        )


def entry_of_codes(rounded, stream):
    """Return the documented entry of a quantized or entropy-coded layer."""
    code_format = rounded.scales.format
    return {
        "bits": code_format.bits,
        "group_size": code_format.group_size,
        "scale_bits": code_format.scale_bits,
        "scale_exponent": rounded.scales.exponent,
        **({"coded_bytes": len(stream)} if rounded.entropy_coded else {}),
    }


def saved_config(model, folder):
    model.save_pretrained(folder / "stock")
    return (folder / "stock" / "config.json").read_text()
