"""Calibration inputs of every kind, from files and synthetic."""

import hashlib
import wave
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor

from rocket_core.calibration.inputs import EncoderText, open_source, shift_right
from rocket_core.calibration.media import folder_audio, folder_images, synthetic_audio, synthetic_images
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.config import CalibrationConfig
from rocket_core.errors import CalibrationError, CheckpointFormatError, EmptyCalibrationError, InvalidConfigError
from rocket_core.models.architecture import build_architecture, read_config
from tests.reference.tiny_models import IMAGE_SIZE, MEL_BINS, byte_tokenizer, save_tiny_model

RATE = 16_000


def source(family, folder, length=16):
    if not folder.exists():
        save_tiny_model(family, folder)
    return open_source(folder, build_architecture(read_config(folder), torch.float32), length)


def write_wave(file, samples, *, rate=RATE, channels=1, width=2):
    with wave.open(str(file), "wb") as recording:
        recording.setnchannels(channels)
        recording.setsampwidth(width)
        recording.setframerate(rate)
        recording.writeframes(np.asarray(samples, dtype=f"<i{width}").tobytes())


def text_file(folder, text):
    file = folder / "text.txt"
    file.write_text(text)
    return str(file)


def test_the_decoder_gets_the_next_window_shifted_right(tmp_path):
    text = "".join(chr(97 + index % 26) for index in range(200))
    settings = CalibrationConfig(dataset=text_file(tmp_path, text), samples=3)
    inputs = source("t5", tmp_path / "model").draw(settings).tensors
    # The tokenizer ends each text with </s> (2); the document begins with <s> (1).
    body = [1, *byte_tokenizer()(text)["input_ids"]]
    for pair in range(3):
        encoder, decoder = body[30 * pair : 30 * pair + 15], body[30 * pair + 15 : 30 * pair + 30]
        assert inputs["input_ids"][pair].tolist() == [*encoder, 2]
        assert inputs["decoder_input_ids"][pair].tolist() == [0, *decoder]


def test_an_encoder_gets_full_windows_with_special_tokens(tmp_path):
    windows = EncoderText(tokenizer=byte_tokenizer("<s> $A </s>"), length=8).windows(["abcdefghijkl"] * 3, 5)
    assert windows.shape == (5, 8)
    assert windows[:, 0].tolist() == [1] * 5
    assert windows[:, -1].tolist() == [2] * 5
    with pytest.raises(InvalidConfigError, match="adds 2 tokens"):
        EncoderText(tokenizer=byte_tokenizer("<s> $A </s>"), length=2).windows(["abc"], 1)


def test_too_little_text_for_a_pair_is_an_error(tmp_path):
    settings = CalibrationConfig(dataset=text_file(tmp_path, "a" * 20), samples=3)
    with pytest.raises(EmptyCalibrationError, match="needs two"):
        source("t5", tmp_path / "model").draw(settings)


def test_labels_with_a_start_token_get_no_second_one():
    labels = torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2]])
    assert shift_right(labels, 0).tolist() == [[0, 1, 5, 6], [0, 1, 7, 8]]
    assert shift_right(labels, 1).tolist() == [[1, 5, 6], [1, 7, 8]]


def test_images_are_preprocessed_by_the_models_processor(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for name, value in (("a.png", 0), ("b.JPG", 255), ("c.jpeg", 255)):
        Image.new("L", (50, 40), value).save(images / name)
    (images / "notes.txt").write_text("no image")
    settings = CalibrationConfig(dataset=str(images), samples=10)
    pixels = source("vit", tmp_path / "model").draw(settings).tensors["pixel_values"]
    assert pixels.shape == (3, 3, IMAGE_SIZE, IMAGE_SIZE)
    # Resized, and from [0, 255] to [-1, 1] by mean and deviation 0.5.
    assert sorted(pixels.mean((1, 2, 3)).tolist()) == pytest.approx([-1, 1, 1], abs=1e-3)


def test_the_seed_decides_which_images_are_drawn(tmp_path):
    for value in range(20):
        Image.new("L", (4, 4), value).save(tmp_path / f"{value}.png")

    def drawn(seed):
        return [image.getpixel((0, 0))[0] for image in islice(folder_images(tmp_path, seed=seed), 5)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_an_invalid_image_is_named(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    with pytest.raises(CalibrationError, match=r"broken\.png cannot be read as an image"):
        list(folder_images(tmp_path, seed=0))


def test_a_processor_of_another_model_is_refused(tmp_path):
    save_tiny_model("vit", tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(file.read_text().replace(str(IMAGE_SIZE), "16"))
    with pytest.raises(CalibrationError, match="16 x 16 pixels, the model takes 32"):
        source("vit", tmp_path / "model").draw(CalibrationConfig(dataset="synthetic", samples=1))
    file.unlink()
    with pytest.raises(CheckpointFormatError, match="cannot read the image processor"):
        source("vit", tmp_path / "model")


def test_synthetic_images_depend_on_the_seed_and_have_edges():
    one, again, other = (next(synthetic_images(64, seed=seed)) for seed in (0, 0, 1))
    assert one.size == (64, 64)
    assert one.tobytes() == again.tobytes() != other.tobytes()
    pixels = np.asarray(one, dtype=np.float64).mean(2)
    steps = np.abs(np.diff(pixels, axis=1))
    # Flat nearly everywhere, with steps far larger than the noise: like photographs, and unlike noise.
    assert np.median(steps) < 6
    assert steps.max() > 50


def test_recordings_are_cut_into_consecutive_windows(tmp_path):
    recordings = tmp_path / "wav"
    recordings.mkdir()
    for number, seconds in enumerate((0.5, 0.75, 1.25, 0.25)):
        noise = np.random.default_rng(number).integers(-3000, 3000, int(seconds * RATE))
        write_wave(recordings / f"{number}.wav", noise)
    settings = CalibrationConfig(dataset=str(recordings), samples=9, seed=3)
    tensors = source("whisper", tmp_path / "model").draw(settings).tensors
    assert tensors["input_features"].shape == (2, MEL_BINS, 100)
    assert tensors["decoder_input_ids"].shape == (2, 15)
    assert tensors["decoder_input_ids"][:, 0].tolist() == [1, 1]
    joined = np.concatenate(list(folder_audio(recordings, seed=3, rate=RATE)))
    extractor = WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1)
    expected = extractor(joined[RATE : 2 * RATE], sampling_rate=RATE, return_tensors="pt")["input_features"][0]
    torch.testing.assert_close(tensors["input_features"][1], expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rate": 44_100}, "at 44100 Hz"), ({"channels": 2}, "2 channels"), ({"width": 4}, "32 bits")],
)
def test_recordings_in_another_format_are_refused_with_advice(tmp_path, options, said):
    write_wave(tmp_path / "a.wav", [0] * 100, **options)
    with pytest.raises(CalibrationError, match=rf"a\.wav has .*{said}.*16 bits at 16000 Hz: convert it"):
        list(folder_audio(tmp_path, seed=0, rate=RATE))


def test_an_invalid_recording_is_named(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(CalibrationError, match=r"a\.wav cannot be read"):
        list(folder_audio(tmp_path, seed=0, rate=RATE))


def test_recordings_shorter_than_a_window_are_an_error(tmp_path):
    save_tiny_model("whisper", tmp_path / "model")
    write_wave(tmp_path / "a.wav", [0] * 100)
    with pytest.raises(EmptyCalibrationError, match="shorter than the 1 s"):
        source("whisper", tmp_path / "model").draw(CalibrationConfig(dataset=str(tmp_path)))


def test_synthetic_audio_depends_on_the_seed_and_stays_in_range():
    one, again, other = (next(synthetic_audio(RATE, seed=seed, rate=RATE)) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.abs(one).max() <= 1
    assert np.abs(one).mean() > 0.01


def test_the_hash_of_text_is_that_of_its_token_ids():
    tokens = torch.arange(12).reshape(3, 4)
    assert CalibrationInputs.of_text(tokens).sha256() == hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def test_batches_hold_every_sample_once_and_cast_floats():
    inputs = CalibrationInputs(tensors={"pixel_values": torch.rand(5, 2), "input_ids": torch.arange(5)})
    batches = list(inputs.batches(2, torch.device("cpu"), torch.bfloat16))
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), torch.arange(5))
    assert {batch["pixel_values"].dtype for batch in batches} == {torch.bfloat16}
    assert torch.equal(inputs[3:].tensors["input_ids"], torch.tensor([3, 4]))
