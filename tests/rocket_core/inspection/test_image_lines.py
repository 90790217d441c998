import json

import pytest

from rocket_core.config import compression_config
from rocket_core.errors import CalibrationError
from rocket_core.inspection.image_lines import check_images, names_images

TOWER = {"model_type": "llava", "vision_config": {}}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def data(tmp_path):
    """Write lines to a file with an image next to it, and return the file."""
    (tmp_path / "1.png").write_bytes(PNG)
    (tmp_path / "2.png").write_bytes(b"text")

    def make(*lines):
        file = tmp_path / "captions.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return file

    return make


def check(file, settings=TOWER, **options):
    how = {"include": ["vision"]} if options.pop("vision", False) else {}
    config = compression_config(ratio=0.3, calibration={"dataset": str(file)}, **how)
    check_images(settings, config, "the model", **options)


GOOD = {"image": "1.png", "text": "a"}


def test_images_that_exist_are_accepted(data):
    file = data(GOOD, {"text": "b"})
    check(file)
    assert names_images(file)
    assert not names_images(data({"text": "b"}))


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
    assert not names_images(file)
