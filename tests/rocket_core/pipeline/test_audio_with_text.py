"""Calibration of models that read text and audio on both."""

import json

import pytest
import torch
from PIL import Image

from rocket_core.checkpoint import find_model
from rocket_core.errors import CalibrationError
from rocket_core.pipeline import compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run, run_identity
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from tests.reference.sensitivity import silent_monitor, squared_gradients
from tests.reference.tiny_speech import (
    AUDIO_TOKEN,
    SPEECH,
    save_tiny_speech,
    save_tiny_speech_processor,
    write_recording,
)
from tests.sampling import sweep

# With a chat template and samples of one length; with a tower of images as well.
FAMILIES = ["qwen2_audio", "qwen3_omni_moe_thinker", "qwen3_asr"]
REFUSED = {
    "voxtral": "mistral-common",
    "granite_speech": "torchaudio",
    "vibevoice": "hears none",
    "vibevoice_asr": "random",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return complete checkpoints of the tiny families with their processors, made once."""
    made = {}

    def make(family):
        if family not in made:
            path = tmp_path_factory.mktemp("speech") / family
            made[family] = save_tiny_speech_processor(family, save_tiny_speech(family, path))
        return made[family]

    return make


@pytest.fixture
def recordings(tmp_path):
    """Return a calibration file that names recordings, with a line of text alone."""
    (tmp_path / "data" / "below").mkdir(parents=True)
    lines = []
    for number in range(4):
        name = f"below/{number}.wav"
        write_recording(tmp_path / "data" / name, seconds=0.3 + 0.1 * number, seed=number)
        lines.append(json.dumps({"audio": name, "text": f"sound {number}"}))
    file = tmp_path / "data" / "spoken.jsonl"
    file.write_text("\n".join([*lines, json.dumps({"text": "no sound"})]) + "\n")
    return file


def on(file, **changes):
    return {"dataset": str(file), "samples": 5, "sequence_length": 48} | changes


def opened(folder, config):
    run = prepare_run(find_model(str(folder)), config)
    return run, run.inputs.draw(run.config.calibration)


def batches(inputs):
    return list(inputs.batches(1, torch.device("cpu"), torch.float32))


def original(family, folder):
    return type(SPEECH[family]()).from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_matches_the_whole_model(family, folder, recordings, settings):
    run, inputs = opened(folder(family), settings(calibration=on(recordings)))
    assert len(inputs) == 5
    heard = [batch for batch in batches(inputs) if "input_features" in batch]
    assert len(heard) == 4
    assert all(int((batch["input_ids"] == AUDIO_TOKEN).sum()) > 3 for batch in heard)
    assert run.architecture.audio_tower not in run.idle
    walk = BlockWalk(run, inputs, lambda: None)
    blocks = run.architecture.lists[0]
    walk.advance_to(blocks.stop)
    whole = original(family, folder(family))
    seen = []
    whole.get_submodule(blocks.name)[-1].register_forward_hook(
        lambda _module, _args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        for batch in batches(inputs):
            whole(**batch)
    for found, expected in zip(walk._states.hidden, seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", sweep(FAMILIES[:1], soak=FAMILIES[1:]))
def test_a_model_is_compressed_for_audio_and_text(family, folder, recordings, settings, tmp_path):
    config = settings(preset="fast", kinds=("factored",), calibration=on(recordings), export=("rocket",))
    report = compress(str(folder(family)), tmp_path / "out", config)
    assert report.calibration.kind == "text and audio"
    assert all(layer.achieved_error < 1 for layer in report.layers)
    card = (tmp_path / "out" / "rocket" / "README.md").read_text()
    assert "calibrated on 5 texts with audio of `spoken.jsonl`" in card


@pytest.mark.parametrize("family", sweep(FAMILIES[:1], soak=FAMILIES[1:]))
def test_sensitivities_leave_out_placeholders_of_audio(family, folder, recordings, settings, open_work):
    unweighted = {"token_weights": "none"}
    run, inputs = opened(folder(family), settings(preset="fast", calibration=on(recordings), **unweighted))
    found = measure_sensitivities(run, inputs, open_work(run, inputs), silent_monitor(run), windows=len(inputs))
    names = [name for block in run.layers for name in block if ".experts." not in name]
    whole, total, tokens = original(family, folder(family)), dict.fromkeys(names, 0.0), 0
    for batch in batches(inputs):
        predicted = (batch["input_ids"] != AUDIO_TOKEN)[:, 1:, None]
        for name, squares in squared_gradients(whole, names, batch, predicted=predicted).items():
            total[name] = total[name] + squares * batch["input_ids"].numel()
        tokens += batch["input_ids"].numel()
    for name in names:
        torch.testing.assert_close(found[name].fisher_diagonal, total[name] / tokens, rtol=1e-3, atol=1e-8)


def test_another_recording_of_the_same_name_is_other_data(folder, recordings, settings):
    config = settings(calibration=on(recordings))
    before = run_identity(prepare_run(find_model(str(folder("qwen2_audio"))), config))
    write_recording(recordings.parent / "below" / "0.wav", seed=9)
    assert run_identity(prepare_run(find_model(str(folder("qwen2_audio"))), config)) != before


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_calibrated_on_audio_say_why(family, recordings, settings, tmp_path):
    model = save_tiny_speech(family, tmp_path / "model")
    with pytest.raises(CalibrationError, match=f"line 1 names audio, and .* cannot be calibrated.*{REFUSED[family]}"):
        prepare_run(find_model(str(model)), settings(calibration=on(recordings)))


def test_a_thinker_can_be_calibrated_on_images_instead(folder, tmp_path, settings):
    Image.new("RGB", (40, 32), "red").save(tmp_path / "1.png")
    (tmp_path / "data.jsonl").write_text(json.dumps({"image": "1.png", "text": "red"}))
    config = settings(calibration=on(tmp_path / "data.jsonl"))
    run, inputs = opened(folder("qwen3_omni_moe_thinker"), config)
    assert run.idle == (run.architecture.audio_tower,)
    assert "pixel_values" in batches(inputs)[0]
    BlockWalk(run, inputs, lambda: None).advance_to(1)


def test_a_recording_of_another_rate_is_refused(folder, recordings, settings):
    write_recording(recordings.parent / "below" / "2.wav", rate=8000)
    with pytest.raises(CalibrationError, match=r"2\.wav has 1 channels of 16 bits at 8000 Hz"):
        opened(folder("qwen2_audio"), settings(calibration=on(recordings)))


def test_audio_longer_than_a_sample_is_refused(folder, recordings, settings):
    with pytest.raises(CalibrationError, match="the audio takes more than the 4 tokens of a sample; raise the seq"):
        opened(folder("qwen2_audio"), settings(calibration=on(recordings, sequence_length=4)))
