"""Calibration of models that read text and images on both."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Cache

from rocket_core.checkpoint import find_model
from rocket_core.errors import CalibrationError, CheckpointFormatError
from rocket_core.pipeline import compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run, run_identity
from tests.reference.tiny_vision import save_tiny_processor, save_tiny_vision, stand_in_for_libraries
from tests.sampling import sweep

# DeepStack and positions of three axes; attention in both directions.
KEPT = ["qwen3_vl", "gemma3", "llava", "qwen2_5_vl", "qwen3_vl_moe"]
FAMILIES = sweep(KEPT, soak=["qwen2_vl", "idefics3", "smolvlm", "llama4"])
stand_in_for_libraries()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return complete checkpoints of the tiny families with their processors, made once."""
    made = {}

    def make(family):
        if family not in made:
            path = tmp_path_factory.mktemp("vision") / family
            made[family] = save_tiny_processor(family, save_tiny_vision(family, path))
        return made[family]

    return make


@pytest.fixture
def images(tmp_path):
    """Return a calibration file that names images, with a line of text alone."""
    generator = np.random.default_rng(0)
    (tmp_path / "data" / "below").mkdir(parents=True)
    lines = []
    for number in range(6):
        pixels = generator.integers(0, 255, (32 + number, 40, 3), dtype=np.uint8)
        name = f"below/{number}.png"
        Image.fromarray(pixels).save(tmp_path / "data" / name)
        lines.append(json.dumps({"image": name, "text": f"picture {number}"}))
    file = tmp_path / "data" / "captions.jsonl"
    file.write_text("\n".join([*lines, json.dumps({"text": "no picture"})]) + "\n")
    return file


def on(file, **changes):
    return {"dataset": str(file), "samples": 7, "sequence_length": 48} | changes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_matches_the_whole_model(family, folder, images, settings):
    run = prepare_run(find_model(str(folder(family))), settings(calibration=on(images)))
    inputs = run.inputs.draw(run.config.calibration)
    assert len(inputs) == 7
    walk = BlockWalk(run, inputs, lambda: None)
    blocks = run.architecture.lists[0]
    walk.advance_to(blocks.stop)
    whole = AutoModelForImageTextToText.from_pretrained(folder(family))
    seen = []
    whole.get_submodule(blocks.name)[-1].register_forward_hook(
        lambda _module, _args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        for batch in inputs.batches(1, torch.device("cpu"), torch.float32):
            whole(**batch)
    assert len(seen) == 7
    calls = [call for calls in walk._states.calls for call in calls]
    assert not any(isinstance(value, Cache) for call in calls for value in (*call.args, *call.kwargs.values()))
    for found, expected in zip(walk._states.hidden, seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if family.startswith("qwen3_vl"):
        assert sum(added is not None for call in walk._states.added for added in call) == 6 * min(2, blocks.length - 1)


@pytest.mark.parametrize("family", KEPT)
def test_a_model_is_compressed_for_images_and_text(family, folder, images, settings, tmp_path):
    config = settings(preset="fast", kinds=("factored",), calibration=on(images), export=("rocket",))
    report = compress(str(folder(family)), tmp_path / "out", config)
    assert report.calibration.kind == "text and images"
    assert report.calibration.tokens == sum(len(ids[0]) for ids in _tokens(folder(family), config))
    assert all(layer.achieved_error < 1 for layer in report.layers)
    card = (tmp_path / "out" / "rocket" / "README.md").read_text()
    assert "AutoModelForImageTextToText, AutoProcessor" in card
    assert "calibrated on 7 texts with images of `captions.jsonl`" in card


@pytest.mark.parametrize("family", sweep(["qwen2_vl"], soak=["llava", "qwen3_vl", "gemma3"]))
def test_a_decoder_is_refined_for_images_and_text(family, folder, images, settings, tmp_path):
    # What is held out is trained on as well, so that a few samples suffice.
    images.write_text(4 * images.read_text())
    changes = {"sensitivity_samples": 2, "kinds": ("factored",), "ratio": 0.5, "export": ("rocket",)}
    config = settings(preset="max", calibration=on(images, samples=28), **changes)
    report = compress(str(folder(family)), tmp_path / "out", config)
    assert report.calibration.kind == "text and images"
    assert len(report.refinement) == len({layer.name.rsplit(".", 2)[0] for layer in report.layers})
    assert all(block.error_after <= block.error_before for block in report.refinement)
    assert any(block.error_after < 0.95 * block.error_before for block in report.refinement)
    refined = AutoModelForImageTextToText.from_pretrained(tmp_path / "out" / "rocket")
    batch = next(_inputs(folder(family), config).batches(1, refined.device, torch.float32))
    with torch.no_grad():
        assert refined(**batch).logits.isfinite().all()


def _inputs(model, config):
    return prepare_run(find_model(str(model)), config).inputs.draw(config.calibration)


def _tokens(model, config):
    return _inputs(model, config).token_ids


def test_another_image_of_the_same_name_is_other_data(folder, images, settings):
    config = settings(calibration=on(images))
    before = run_identity(prepare_run(find_model(str(folder("llava"))), config))
    Image.new("RGB", (32, 32)).save(images.parent / "below" / "0.png")
    assert run_identity(prepare_run(find_model(str(folder("llava"))), config)) != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image": "none.png", "text": "a"}, r"line 2 names the image 'none.png', which does not exist"),
        ({"image": "../out.png", "text": "a"}, r"line 2 names the image '../out.png', which is not in the folder"),
        ({"image": 3, "text": "a"}, r'line 2: "image" is not the path of a file'),
        ({"image": "below/0.png"}, r'line 2 has no string "text"'),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, message, folder, images, settings):
    lines = images.read_text().splitlines()
    images.write_text("\n".join([lines[0], json.dumps(line), *lines[1:]]))
    with pytest.raises(CalibrationError, match=message):
        _tokens(folder("llava"), settings(calibration=on(images)))


def test_an_image_that_cannot_be_read_is_named(folder, images, settings):
    (images.parent / "below" / "2.png").write_bytes(b"\x89PNG, damaged")
    with pytest.raises(CalibrationError, match=r"2\.png cannot be read as an image"):
        _tokens(folder("llava"), settings(calibration=on(images)))


def test_an_image_longer_than_a_sample_is_refused(folder, images, settings):
    with pytest.raises(CalibrationError, match="raise the sequence length"):
        _tokens(folder("llava"), settings(calibration=on(images, sequence_length=8)))


def test_a_model_of_text_alone_refuses_images(model_folder, images, settings):
    with pytest.raises(CalibrationError, match=r"line 1 names an image, and llama reads no images"):
        prepare_run(find_model(str(model_folder("llama"))), settings(calibration=on(images)))


def test_a_folder_without_a_processor_is_refused(tmp_path, images, settings):
    model = save_tiny_vision("llava", tmp_path / "model")
    with pytest.raises(CheckpointFormatError, match=r"neither preprocessor_config.json nor processor_config.json"):
        prepare_run(find_model(str(model)), settings(calibration=on(images)))
