import json

import pytest

from rocket_core.config import compression_config
from rocket_core.errors import CalibrationError
from rocket_core.inspection.checks.media_lines import check_media, names_media
from tests.reference.tiny_speech import write_recording

TOWER = {"model_type": "llava", "vision_config": {}}
HEARS = {"model_type": "qwen2_audio", "audio_config": {}}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def data(tmp_path):
    """Write lines to a file with an image and a recording next to it, and return the file."""
    (tmp_path / "1.png").write_bytes(PNG)
    (tmp_path / "2.png").write_bytes(b"text")
    write_recording(tmp_path / "1.wav", seconds=0.01)

    def make(*lines):
        file = tmp_path / "captions.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return file

    return make


def check(file, settings=TOWER, **options):
    how = {"include": ["vision"]} if options.pop("vision", False) else {}
    config = compression_config(ratio=0.3, calibration={"dataset": str(file)}, **how)
    check_media(settings, config, "the model", **options)


GOOD = {"image": "1.png", "text": "a"}
HEARD = {"audio": "1.wav", "text": "a"}


def test_images_that_exist_are_accepted(data):
    file = data(GOOD, {"text": "b"})
    check(file)
    assert names_media(file)
    assert not names_media(data({"text": "b"}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image": "3.png", "text": "a"}, "captions, line 2 names the image '3.png', which does not exist"),
        ({"image": "../1.png", "text": "a"}, "which is not in the folder of the file"),
        ({"image": "2.png", "text": "a"}, "names '2.png', which cannot be read as an image"),
        ({"image": 3, "text": "a"}, "is not the path of a file"),
        ({"image": "1.png"}, 'has no string "text"'),
    ],
)
def test_a_bad_line_is_refused_by_its_number(data, line, message):
    with pytest.raises(CalibrationError, match=message) as error:
        check(data(GOOD, line), name="captions")
    assert str(error.value).startswith("captions, line 2")
    check(data(GOOD, line), most_lines=1)


def test_recordings_are_accepted_by_models_that_hear(data):
    check(data(HEARD, {"text": "b"}), settings=HEARS)
    assert names_media(data(HEARD))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "llama"}, "it reads no audio with text"),
        ({"model_type": "whisper", "is_encoder_decoder": True, "audio_config": {}}, "it reads no audio with text"),
        ({"model_type": "voxtral", "audio_config": {}}, "only with the tokenizer of mistral-common"),
        ({"model_type": "granite_speech"}, "its feature extractor needs torchaudio"),
    ],
)
def test_models_that_cannot_hear_say_why(settings, reason, data):
    with pytest.raises(CalibrationError, match=f"line 1 names audio, and the model cannot .*{reason}"):
        check(data(HEARD), settings=settings)


def test_files_that_are_no_recordings_are_refused(data):
    file = data(HEARD, {"audio": "1.png", "text": "b"})
    with pytest.raises(CalibrationError, match=r"line 2 names '1.png', which cannot be read as a recording: a .wav"):
        check(file, settings=HEARS)
    content = bytearray((file.parent / "1.wav").read_bytes())
    content[22] = 2  # channels
    (file.parent / "1.wav").write_bytes(content)
    with pytest.raises(CalibrationError, match=r"line 1 names '1.wav', which cannot be read as a recording"):
        check(file, settings=HEARS)


def test_a_file_names_images_or_audio(data):
    with pytest.raises(CalibrationError, match="line 1 names an image and audio; give each its own line"):
        check(data(GOOD | HEARD), settings=TOWER | HEARS)
    with pytest.raises(CalibrationError, match="line 2 names audio, and lines before it an image; give one kind"):
        check(data(GOOD, HEARD), settings=TOWER | HEARS)
    with pytest.raises(CalibrationError, match="line 1 has no image"):
        check(data(HEARD), settings=TOWER | HEARS, vision=True)


def test_a_model_without_a_tower_reads_no_images(data):
    with pytest.raises(CalibrationError, match="line 1 names an image, and the model reads no images with text"):
        check(data(GOOD), settings={"model_type": "llama"})


def test_a_tower_is_calibrated_on_images_alone(data):
    check(data(GOOD), vision=True)
    with pytest.raises(CalibrationError, match="line 2 has no image"):
        check(data(GOOD, {"text": "b"}), vision=True)
    for dataset in (data(), "builtin"):
        with pytest.raises(CalibrationError, match=r"include vision: the tower is calibrated on images, and .* has no"):
            check(dataset, vision=True)


def test_a_damaged_file_names_no_images(data):
    file = data(GOOD)
    file.write_text("{")
    assert not names_media(file)
