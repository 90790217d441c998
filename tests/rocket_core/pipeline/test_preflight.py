import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocket_core.checkpoint.reader import read_header
from rocket_core.errors import (
    AlreadyQuantizedError,
    CalibrationError,
    CheckpointFormatError,
    CorruptCheckpointError,
    EmptyCalibrationError,
    IllConditionedGramError,
    InfeasibleBudgetError,
    InsufficientDiskError,
    InsufficientMemoryError,
    InvalidConfigError,
    ModelNotFoundError,
    NonFiniteCalibrationError,
    UnknownDatasetError,
    UnmatchedIgnoreError,
    UnsupportedArchitectureError,
)
from rocket_core.pipeline import compress, requirements
from rocket_core.system import devices
from tests.reference.observers import Watch
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture
def model(tmp_path):
    save_tiny_model("llama", tmp_path / "model")
    return tmp_path / "model"


def refused(error, match, model, tmp_path, config):
    """Check that a run is refused before any long work: no layer has been profiled."""
    with pytest.raises(error, match=match):
        compress(str(model), tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def edit_config(model, **fields):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def add_raw_tensor(model, key, dtype, shape, data):
    file = model / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body + data)


def test_a_missing_model_is_refused(tmp_path, settings):
    with pytest.raises(ModelNotFoundError, match="neither a folder nor"):
        compress(str(tmp_path / "nowhere"), tmp_path / "out", settings())
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_refused(model, tmp_path, settings):
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(AlreadyQuantizedError, "gptq", model, tmp_path, settings())


def test_integer_weights_are_refused(model, tmp_path, settings):
    edit_weights(model, lambda tensors: tensors.update({k: v.to(torch.int8) for k, v in tensors.items()}))
    refused(AlreadyQuantizedError, "I8", model, tmp_path, settings())


def test_an_unknown_architecture_is_refused(model, tmp_path, settings):
    edit_config(model, model_type="nonesuch")
    refused(UnsupportedArchitectureError, "nonesuch", model, tmp_path, settings())


def test_pickled_weights_are_refused(model, tmp_path, settings):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(CheckpointFormatError, "pickle", model, tmp_path, settings())


def test_a_truncated_checkpoint_is_refused(model, tmp_path, settings):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(CorruptCheckpointError, "fetch it again", model, tmp_path, settings())


def test_a_missing_tensor_is_named(model, tmp_path, settings):
    edit_weights(model, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    with pytest.raises(CorruptCheckpointError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        compress(str(model), tmp_path / "out", settings())


def test_a_tensor_of_another_shape_is_refused(model, tmp_path, settings):
    edit_weights(model, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}))
    with pytest.raises(CorruptCheckpointError, match="shapes"):
        compress(str(model), tmp_path / "out", settings())


def test_a_folder_without_tokenizer_is_refused(model, tmp_path, settings):
    for file in model.glob("*token*"):
        file.unlink()
    refused(CheckpointFormatError, "cannot read the tokenizer", model, tmp_path, settings())


def test_an_unknown_dataset_is_refused(model, tmp_path, settings):
    refused(UnknownDatasetError, "wikitext2", model, tmp_path, settings(calibration={"dataset": "wikitex2"}))


def test_too_little_text_is_refused(model, tmp_path, settings):
    (tmp_path / "short.txt").write_text("a few words")
    config = settings(calibration={"dataset": str(tmp_path / "short.txt"), "sequence_length": 32})
    refused(EmptyCalibrationError, "32", model, tmp_path, config)


def test_a_sequence_beyond_the_models_context_is_refused(model, tmp_path, settings, text):
    config = settings(calibration={"dataset": str(text), "sequence_length": 65})
    refused(InvalidConfigError, "64 tokens at most", model, tmp_path, config)


def test_a_tokenizer_of_another_model_is_refused(model, tmp_path, settings):
    edit_config(model, vocab_size=100)
    edit_weights(
        model, lambda tensors: tensors.update({k: v[:100].clone() for k, v in tensors.items() if v.shape[:1] == (320,)})
    )
    refused(CalibrationError, "100 embeddings", model, tmp_path, settings())


def test_an_unmatched_ignore_pattern_is_refused(model, tmp_path, settings):
    refused(UnmatchedIgnoreError, "did you mean", model, tmp_path, settings(ignore=("*.q_prj",)))


def test_ignoring_everything_is_refused(model, tmp_path, settings):
    refused(UnsupportedArchitectureError, "no layer is left", model, tmp_path, settings(ignore=("*",)))


def test_an_unknown_device_is_refused(model, tmp_path, settings):
    with pytest.raises(InvalidConfigError, match="no-such-device"):
        compress(str(model), tmp_path / "out", settings(device="no-such-device"))


def test_an_unreachable_ratio_names_one_that_works(model, tmp_path, settings):
    with pytest.raises(InfeasibleBudgetError, match="at most") as caught:
        compress(str(model), tmp_path / "out", settings(ratio=0.9))
    assert 0.69 <= caught.value.nearest_ratio < 0.72
    report = compress(str(model), tmp_path / "out", settings(ratio=caught.value.nearest_ratio))
    assert report.totals.achieved_ratio >= caught.value.nearest_ratio


def test_too_little_memory_is_refused(model, tmp_path, settings, monkeypatch):
    monkeypatch.setattr(requirements, "free_memory", lambda _device: 10 * 2**20)
    refused(InsufficientMemoryError, "fewer samples", model, tmp_path, settings())


def test_too_little_disk_is_refused(model, tmp_path, settings, monkeypatch):
    monkeypatch.setattr(requirements, "free_disk", lambda _folder: 1000)
    refused(InsufficientDiskError, "of disk", model, tmp_path, settings())


def test_non_finite_weights_name_the_layer(model, tmp_path, settings):
    def spoil(tensors):
        tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = float("nan")

    edit_weights(model, spoil)
    with pytest.raises(NonFiniteCalibrationError, match=r"model\.layers\.1\.self_attn"):
        compress(str(model), tmp_path / "out", settings())


def test_a_disk_that_fills_up_while_writing_is_a_rocket_error(model, tmp_path, settings, monkeypatch):
    from rocket_core.pipeline.state import files

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_safetensors", full)
    with pytest.raises(InsufficientDiskError, match="free some space and resume"):
        compress(str(model), tmp_path / "out", settings())


def test_running_out_of_memory_is_a_rocket_error(model, tmp_path, settings, monkeypatch):
    from rocket_core.pipeline.stages import profile as stages

    def exhausted(*_args, **_kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.setattr(stages, "_profile_one", exhausted)
    with pytest.raises(InsufficientMemoryError, match=r"20\.00 GiB"):
        compress(str(model), tmp_path / "out", settings())


def test_the_estimate_covers_what_a_run_takes(model, settings):
    from rocket_core.checkpoint import find_model
    from rocket_core.pipeline.preflight import prepare_run

    run = prepare_run(find_model(str(model)), settings())
    few, many = (requirements.estimate_resources(run, windows) for windows in (1_000, 100_000))
    # Beyond one batch only the hidden states grow: 32 tokens of 32 float32 numbers.
    assert many.memory_bytes - few.memory_bytes == 99_000 * 32 * 32 * 4
    assert few.disk_bytes == many.disk_bytes > 2 * run.checkpoint.stored_bytes


def test_tensors_of_an_unknown_dtype_are_copied(model, tmp_path, settings):
    add_raw_tensor(model, "model.extra.scale", "F4", [8], b"\x12\x34\x56\x78")
    compress(str(model), tmp_path / "out", settings())
    for kind in ("rocket", "dense"):
        entries = {entry.key: entry for entry in read_header(tmp_path / "out" / kind / "model.safetensors")}
        assert b"".join(entries["model.extra.scale"].chunks()) == b"\x12\x34\x56\x78"


@pytest.mark.parametrize(
    ("key", "more"), [("self_attn.q_norm.weight", ""), ("mlp.up_proj.scale", ""), ("mlp.up_proj.bias", "and 1 more")]
)
def test_tensors_that_the_model_does_not_take_are_refused(model, tmp_path, settings, key, more):
    keys = [f"model.layers.{index}.{key}" for index in (range(2) if more else [1])]
    edit_weights(model, lambda tensors: tensors.update({name: torch.ones(8) for name in keys}))
    message = rf"{keys[0]}' \(F32, shape \(8,\)\).*{more}.*LlamaForCausalLM does not take.*config\.json"
    refused(CheckpointFormatError, message, model, tmp_path, settings())


def test_tensors_that_transformers_leaves_out_are_no_obstacle(model, tmp_path, settings):
    remains = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8),
        "model.layers.0.self_attn.masked_bias": torch.tensor(-1e9),
        # These belong to layers that predict later tokens, and to a model around this one.
        "model.layers.2.eh_proj.weight": torch.ones(8, 8),
        "model.extra.weight": torch.ones(8),
    }
    edit_weights(model, lambda tensors: tensors.update(remains))
    compress(str(model), tmp_path / "out", settings())


def test_layers_stored_in_a_wider_dtype_are_counted_as_stored(model, tmp_path, settings):
    def mix(tensors):
        for key in list(tensors):
            wide = "norm" in key or key.endswith("0.self_attn.k_proj.weight")
            tensors[key] = tensors[key] if wide else tensors[key].bfloat16()

    edit_weights(model, mix)
    edit_config(model, dtype="bfloat16")
    report = compress(str(model), tmp_path / "out", settings(ratio=0.05))
    tensors = load_file(tmp_path / "out" / "rocket" / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == torch.float32
    layer = next(layer for layer in report.layers if layer.name.endswith("0.self_attn.k_proj"))
    stored = [value.nbytes for key, value in tensors.items() if key.startswith(f"{layer.name}.")]
    assert layer.stored_bytes == sum(stored)


def test_a_tied_model_may_store_only_its_head(tmp_path, settings):
    save_tiny_model("gemma", tmp_path / "model")

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    edit_weights(tmp_path / "model", rename)
    report = compress(str(tmp_path / "model"), tmp_path / "out", settings())
    assert "lm_head.weight" in load_file(tmp_path / "out" / "dense" / "model.safetensors")
    assert report.totals.model_parameters == sum(
        value.numel() for value in load_file(tmp_path / "model" / "model.safetensors").values()
    )


def test_weights_of_other_tools_are_ignored(model, tmp_path, settings):
    save_file({"adapter": torch.ones(3)}, model / "adapter_model.safetensors")
    (model / "consolidated.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    compress(str(model), tmp_path / "out", settings())
    assert "adapter" not in load_file(tmp_path / "out" / "rocket" / "model.safetensors")


def test_a_layer_without_activity_is_named(model, tmp_path, settings):
    edit_weights(model, lambda tensors: tensors["model.layers.1.post_attention_layernorm.weight"].zero_())
    with pytest.raises(IllConditionedGramError, match=r"layer model\.layers\.1\.mlp\.gate_proj"):
        compress(str(model), tmp_path / "out", settings())


def test_a_file_in_place_of_the_output_folder_is_refused(model, tmp_path, settings):
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(InvalidConfigError, match="is a file"):
        compress(str(model), tmp_path / "out", settings())


def test_the_report_contains_no_local_path(model, tmp_path, settings, text):
    report = compress(str(model), tmp_path / "out", settings())
    assert report.settings.calibration.dataset == report.calibration.dataset == text.name
    assert str(tmp_path) not in (tmp_path / "out" / "report.json").read_text()


def test_progress_never_falls_and_passes_every_stage(model, tmp_path, settings):
    seen = []
    compress(str(model), tmp_path / "out", settings(), observer=Watch(on_progress=seen.append))
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["preflight", "calibrating", "allocating", "factorizing", "exporting"]
    profiled = [progress.layer for progress in seen if progress.stage == "calibrating" and progress.layer]
    assert len(set(profiled)) == 14
    assert any(progress.seconds_left is not None for progress in seen)


def test_auto_device_is_the_cpu_without_an_accelerator():
    if torch.accelerator.is_available():
        assert devices.resolve_device("auto").type != "cpu"
    else:
        assert devices.resolve_device("auto") == torch.device("cpu")
