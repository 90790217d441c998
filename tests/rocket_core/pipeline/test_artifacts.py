import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import rocket_core.hf  # noqa: F401  registers the format
from rocket_core.config import compression_config
from rocket_core.hf import attach_factors
from rocket_core.layers import LayerFactors, unpack_coefficients
from rocket_core.pipeline import compress
from rocket_core.report.schema import CompressionReport
from tests.reference.tiny_models import FAMILIES, VOCAB_SIZE

TOKENS = torch.randint(3, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rocket_artifact_computes_what_its_factors_do(family, finished, model_folder):
    output, report = finished(family)
    tensors = load_file(output / "rocket" / "model.safetensors")
    factors = {}
    for layer in report.layers:
        if layer.kind == "factored":
            name = next(key for key in (layer.name, layer.name.split(".", 1)[1]) if f"{key}.weight_u" in tensors)
            mask = tensors.get(f"{name}.weight_mask")
            coefficients = unpack_coefficients(
                tensors[f"{name}.weight"], mask, layer.rank, layer.d_out, layer=layer.name
            )
            support = None if mask is None else coefficients != 0
            factors[layer.name] = LayerFactors(
                dictionary=tensors[f"{name}.weight_u"].T, coefficients=coefficients, support=support
            )
    assert len(factors) >= len(report.layers) / 2
    in_memory = attach_factors(load(model_folder(family)), factors)
    assert torch.equal(logits(load(output / "rocket")), logits(in_memory))


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_export_is_the_dequantized_model_under_stock_names(family, finished, model_folder):
    output, _ = finished(family)
    dense, original = load(output / "dense"), load(model_folder(family))
    assert type(dense) is type(original)
    assert {key: value.shape for key, value in dense.state_dict().items()} == {
        key: value.shape for key, value in original.state_dict().items()
    }
    dequantized = load(output / "rocket").dequantize()
    for key, value in dense.state_dict().items():
        assert torch.equal(value, dequantized.state_dict()[key]), key
    torch.testing.assert_close(logits(dense), logits(load(output / "rocket")), rtol=1e-3, atol=1e-3)
    config = json.loads((output / "dense" / "config.json").read_text())
    assert config == json.loads((model_folder(family) / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_untouched_tensors_are_byte_identical(family, finished, model_folder):
    output, report = finished(family)
    source = load_file(model_folder(family) / "model.safetensors")
    changed = {layer.name for layer in report.layers if layer.kind == "factored"}
    for kind in ("rocket", "dense"):
        written = load_file(output / kind / "model.safetensors")
        for key, tensor in source.items():
            if not any(f"{name}.weight".endswith(key) for name in changed):
                assert torch.equal(written[key], tensor), key
        if kind == "dense":
            assert written.keys() == source.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_matches_the_files(family, finished, model_folder):
    output, report = finished(family)
    for export in report.exports:
        files = (output / export.folder).glob("*.safetensors")
        assert export.stored_bytes == sum(file.stat().st_size for file in files)
    factored = next(export for export in report.exports if export.kind == "rocket")
    assert report.totals.stored_bytes == factored.stored_bytes < report.totals.dense_bytes
    assert report.totals.dense_bytes == (model_folder(family) / "model.safetensors").stat().st_size
    tensors = load_file(output / "rocket" / "model.safetensors")
    for layer in report.layers:
        names = [
            key
            for key in tensors
            if any(
                key == f"{n}.{part}"
                for n in (layer.name, layer.name.split(".", 1)[1])
                for part in ("weight", "weight_u", "weight_mask")
            )
        ]
        assert layer.stored_bytes == sum(tensors[key].nbytes for key in names), layer.name
        if layer.kind == "factored":
            values = next(tensors[key] for key in names if key.endswith(".weight"))
            assert values.numel() == layer.nnz
            assert layer.kept_parameters == layer.rank * layer.d_in + layer.nnz
            assert layer.sparsity == pytest.approx(1 - layer.nnz / (layer.rank * layer.d_out))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_budget_is_respected_and_nearly_used(family, finished):
    _, report = finished(family)
    kept = sum(layer.kept_parameters for layer in report.layers)
    total = sum(layer.d_in * layer.d_out for layer in report.layers)
    assert report.totals.kept_parameters == kept
    assert report.totals.compressible_parameters == total
    assert kept <= report.allocation.budget <= 0.7 * total
    assert kept >= 0.985 * report.allocation.budget
    assert report.totals.achieved_ratio == pytest.approx(1 - kept / total)


def test_reported_errors_match_the_written_weights(finished, model_folder):
    output, report = finished("llama")
    original, dense = load(model_folder("llama")), load(output / "dense")
    for layer in report.layers:
        before = original.get_submodule(layer.name).weight.detach().double()
        after = dense.get_submodule(layer.name).weight.detach().double()
        error = float((before - after).norm() / before.norm())
        assert error == pytest.approx(layer.weight_error, rel=1e-3, abs=1e-6)


def test_all_files_a_model_needs_are_written_and_no_others(finished):
    output, report = finished("llama")
    assert sorted(path.name for path in output.iterdir()) == ["dense", "report.html", "report.json", "rocket"]
    for kind in ("rocket", "dense"):
        names = {path.name for path in (output / kind).iterdir()}
        assert {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "README.md",
            "report.json",
            "report.html",
        } <= names
        assert not any(name.startswith(".") for name in names)
        assert len(AutoTokenizer.from_pretrained(output / kind)("rocket")["input_ids"]) > 0
        assert CompressionReport.model_validate_json((output / kind / "report.json").read_bytes()) == report
        card = (output / kind / "README.md").read_text()
        assert "base_model: llama" in card
        assert f"{report.totals.kept_parameters:,}" in card
    assert "import rocket_core.hf" in (output / "rocket" / "README.md").read_text()


def test_the_requested_dtype_is_stored(tmp_path, model_folder, settings):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(dtype="bfloat16"))
    for kind in ("rocket", "dense"):
        tensors = load_file(tmp_path / "out" / kind / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} <= {torch.bfloat16, torch.uint8}
        assert load(tmp_path / "out" / kind).dtype == torch.bfloat16
    assert report.totals.stored_bytes < report.totals.dense_bytes / 2


def test_small_shards_give_the_same_model(tmp_path, model_folder, settings, finished):
    compress(str(model_folder("llama")), tmp_path / "out", settings(max_shard_bytes=20_000))
    folder = tmp_path / "out" / "rocket"
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(folder)), logits(load(finished("llama")[0] / "rocket")))


def test_only_the_requested_export_is_written(tmp_path, model_folder, settings):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(export=("dense",)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dense", "report.html", "report.json"]
    assert [export.kind for export in report.exports] == ["dense"]


def test_ignored_layers_are_unchanged(tmp_path, model_folder, settings):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(ignore=("*.down_proj",)))
    assert not any("down_proj" in layer.name for layer in report.layers)
    assert report.skipped == {f"model.layers.{i}.mlp.down_proj": "ignored by '*.down_proj'" for i in range(2)}
    original, written = load(model_folder("llama")), load(tmp_path / "out" / "rocket")
    for i in range(2):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        assert torch.equal(original.get_parameter(name), written.get_parameter(name))


def test_another_dtype_is_work_to_do(tmp_path, model_folder, settings):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(ratio=0.0, dtype="bfloat16"))
    assert all(layer.kind == "dense" for layer in report.layers)
    written = dict(load(tmp_path / "out" / "rocket").named_parameters())
    for name, weight in load(model_folder("llama")).named_parameters():
        assert torch.equal(written[name], weight.bfloat16()), name


def test_objective_whitened_gives_the_lower_output_error(tmp_path, model_folder, settings, finished):
    whitened = compress(str(model_folder("llama")), tmp_path / "out", settings(objective="whitened"))
    total = lambda report: sum(layer.reconstruction_error**2 for layer in report.layers)  # noqa: E731
    assert whitened.allocation.alpha is None
    assert whitened.allocation.total_error == pytest.approx(total(whitened))
    assert total(whitened) < total(finished("llama")[1])


def test_builtin_calibration_needs_no_file(tmp_path, model_folder):
    config = compression_config(ratio=0.3, calibration={"samples": 4, "sequence_length": 32}, export=("rocket",))
    # Folders may be text.
    report = compress(str(model_folder("llama")), str(tmp_path / "out"), config)
    assert report.calibration.dataset == "builtin"
    assert report.calibration.tokens == 128
