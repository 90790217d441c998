"""Encoders, vision, audio and encoder-decoders, from the checkpoint to the artifacts and back."""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import rocket_core.hf
from rocket_core.calibration.grams import collect_statistics
from rocket_core.checkpoint import find_model
from rocket_core.config import compression_config
from rocket_core.errors import CompressionCancelledError, EmptyCalibrationError, UnknownDatasetError
from rocket_core.hf import attach_factors
from rocket_core.layers import LayerFactors, unpack_coefficients
from rocket_core.pipeline import compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run
from tests.reference.observers import Watch
from tests.reference.tiny_models import ALL_FAMILIES, OTHER_FAMILIES, tiny_inputs

RATIO = 0.3
PAIRS = ("t5", "whisper")


@pytest.fixture(scope="module")
def settings_of(text):
    """Return settings of a small run of a family."""

    def make(family, **changes):
        images = ALL_FAMILIES[family]().main_input_name == "pixel_values"
        calibration = {"samples": 12} if images else {"samples": 12, "sequence_length": 32}
        read = "synthetic" if images or family == "whisper" else str(text)
        return compression_config(
            ratio=RATIO,
            calibration=calibration | {"dataset": read},
            **({"preset": "paper", "cap_slack": 0.01, "export": ("rocket", "dense")} | changes),
        )

    return make


@pytest.fixture(scope="module")
def compressed(tmp_path_factory, model_folder, settings_of):
    """Return the output folder and the report of an uninterrupted run of a family."""
    made = {}

    def make(family):
        if family not in made:
            output = tmp_path_factory.mktemp("compressed") / family
            made[family] = output, compress(str(model_folder(family)), output, settings_of(family))
        return made[family]

    return make


def load(folder, report, **options):
    return getattr(transformers, report.model_class).from_pretrained(folder, **options)


@torch.no_grad()
def outputs(model):
    return model(**tiny_inputs(model))[0]


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_the_rocket_artifact_computes_what_its_factors_do(family, compressed, model_folder):
    output, report = compressed(family)
    assert report.model_class == type(ALL_FAMILIES[family]()).__name__
    stored, info = load(output / "rocket", report, output_loading_info=True)
    assert not any(info.values())
    original = load(model_folder(family), report)
    factors = {}
    for layer in report.layers:
        if layer.kind == "factored":
            state = stored.get_submodule(layer.name).state_dict()
            mask = state.get("weight_mask")
            coefficients = unpack_coefficients(state["weight"], mask, layer.rank, layer.d_out, layer=layer.name)
            support = None if mask is None else coefficients != 0
            factors[layer.name] = LayerFactors(
                dictionary=state["weight_u"].T, coefficients=coefficients, support=support
            )
    assert len(factors) >= len(report.layers) / 2
    before = outputs(original)
    assert torch.equal(outputs(stored), outputs(attach_factors(original, factors)))
    assert not torch.allclose(outputs(stored), before, atol=1e-2)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_the_dense_export_has_stock_names_and_the_same_outputs(family, compressed, model_folder):
    output, report = compressed(family)
    dense, source = (load_file(folder / "model.safetensors") for folder in (output / "dense", model_folder(family)))
    assert {key: value.shape for key, value in dense.items()} == {key: value.shape for key, value in source.items()}
    config = json.loads((output / "dense" / "config.json").read_text())
    assert config == json.loads((model_folder(family) / "config.json").read_text())
    exports = [outputs(load(output / kind, report)) for kind in ("dense", "rocket")]
    torch.testing.assert_close(*exports, rtol=1e-3, atol=1e-3)
    base = AutoModel.from_pretrained(output / "dense")
    assert base.base_model_prefix == load(output / "dense", report).base_model_prefix


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_every_block_is_compressed_within_the_budget(family, compressed):
    _, report = compressed(family)
    kept = sum(layer.kept_parameters for layer in report.layers)
    total = sum(layer.d_in * layer.d_out for layer in report.layers)
    assert 0.98 * report.allocation.budget <= kept <= report.allocation.budget <= (1 - RATIO) * total
    model = ALL_FAMILIES[family]()
    linears = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and any(part.isdecimal() for part in name.split("."))
    ]
    assert sorted(layer.name for layer in report.layers) == sorted(linears)
    assert not report.skipped


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_the_report_describes_the_calibration_data(family, compressed, text):
    _, report = compressed(family)
    read = report.calibration
    if family in ("vit", "siglip_vision"):
        assert (read.kind, read.dataset, read.samples) == ("images", "synthetic", 12)
        assert read.tokens == 12 * 17
    elif family == "whisper":
        assert (read.kind, read.dataset, read.samples, read.sequence_length) == ("audio", "synthetic", 12, 32)
        assert read.tokens == 12 * (50 + 32)
    else:
        assert (read.kind, read.dataset, read.sequence_length) == ("text", text.name, 32)
        assert read.tokens == read.samples * 32 * (2 if family == "t5" else 1)


def test_the_card_shows_how_to_load_and_names_synthetic_data(compressed):
    output, _ = compressed("vit")
    for kind in ("rocket", "dense"):
        card = (output / kind / "README.md").read_text()
        assert "from transformers import AutoImageProcessor, ViTForImageClassification\n" in card
        assert "calibrated on 12 images of `synthetic` (seed 0)" in card
        assert "These were made up" in card
    card = (compressed("bert")[0] / "dense" / "README.md").read_text()
    assert "model = BertModel.from_pretrained" in card
    assert "made up" not in card


def test_files_of_sentence_transformers_are_copied(tmp_path, model_folder, settings_of):
    folder = tmp_path / "model"
    model = AutoModel.from_pretrained(model_folder("bert"))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder("bert")).save_pretrained(folder)
    steps = {"modules.json": "[]", "sentence_bert_config.json": "{}", "1_Pooling/config.json": '{"a": 1}'}
    (folder / "1_Pooling").mkdir()
    for name, content in steps.items():
        (folder / name).write_text(content)
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "1_Pooling" / "model.safetensors")
    compress(str(folder), tmp_path / "out", settings_of("bert", export=("dense",)))
    for name, content in steps.items():
        assert (tmp_path / "out" / "dense" / name).read_text() == content
    assert (tmp_path / "out" / "dense" / "1_Pooling" / "model.safetensors").is_file()


@pytest.mark.parametrize("family", PAIRS)
def test_block_walk_matches_the_whole_encoder_decoder(family, model_folder, settings_of):
    run = prepare_run(find_model(str(model_folder(family))), settings_of(family, precision="float64"))
    inputs = run.inputs.draw(run.config.calibration)
    walk = BlockWalk(run, inputs, lambda: None)
    whole = ALL_FAMILIES[family]()
    for index, names in enumerate(run.layers):
        found, _ = walk.statistics(index, names, input_grams=False)
        modules = {name: whole.get_submodule(name) for name in names}
        held = [parameter for parameter in run.architecture.model.parameters() if not parameter.is_meta]
        assert not held, "nothing of the model stays in memory between blocks"
        with torch.no_grad():
            expected = collect_statistics(
                modules,
                [rocket_core.calibration.grams.InputGroup(layers=(name,), from_output=False) for name in names],
                lambda _batch: whole(**inputs.tensors),
                batches=1,
                dtype=torch.float64,
            )
        for name in names:
            assert found[name].tokens == expected[name].tokens
            torch.testing.assert_close(found[name].input_energy, expected[name].input_energy, rtol=1e-4, atol=1e-4)


def test_a_stopped_encoder_decoder_ends_with_identical_bytes(
    tmp_path, model_folder, settings_of, compressed, fingerprint
):
    model, output = str(model_folder("t5")), tmp_path / "out"
    for stop in ("encoder.block.1.", "decoder.block.1."):
        seen = []
        with pytest.raises(CompressionCancelledError):
            compress(
                model,
                output,
                settings_of("t5"),
                resume=True,
                observer=Watch(
                    on_progress=seen.append,
                    should_cancel=lambda: bool(seen) and (seen[-1].layer or "").startswith(stop),  # noqa: B023
                ),
            )
        assert seen[-1].stage == "calibrating"
    compress(model, output, settings_of("t5"), resume=True)
    assert fingerprint(output) == fingerprint(compressed("t5")[0])


@pytest.mark.soak
def test_missing_bases_are_calibrated_again(tmp_path, model_folder, settings_of, compressed, fingerprint):
    compress(str(model_folder("t5")), tmp_path / "out", settings_of("t5", statistics_quota_bytes=0))
    assert fingerprint(tmp_path / "out") == fingerprint(compressed("t5")[0])


def test_data_of_another_kind_is_refused_early(tmp_path, model_folder, text):
    config = compression_config(ratio=RATIO, calibration={"dataset": str(text)})
    for family in ("vit", "whisper"):
        with pytest.raises(UnknownDatasetError, match="give a folder of"):
            compress(str(model_folder(family)), tmp_path / family, config)
    with pytest.raises(UnknownDatasetError, match="use 'builtin'"):
        compress(
            str(model_folder("bert")),
            tmp_path / "bert",
            compression_config(ratio=RATIO, calibration={"dataset": "synthetic"}),
        )
    with pytest.raises(EmptyCalibrationError, match=r"\.png"):
        compress(
            str(model_folder("vit")),
            tmp_path / "empty",
            compression_config(ratio=RATIO, calibration={"dataset": str(tmp_path)}),
        )


def test_an_encoder_reads_windows_between_its_special_tokens(model_folder, settings_of):
    run = prepare_run(find_model(str(model_folder("bert"))), settings_of("bert"))
    tokens = run.inputs.draw(run.config.calibration).tensors["input_ids"]
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bert"))
    assert tokens.shape[1] == 32
    assert set(tokens[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert set(tokens[:, -1].tolist()) == {tokenizer.eos_token_id}
    assert tokenizer.pad_token_id not in tokens
    assert math.prod(tokens.shape) == run.positions * len(tokens)
