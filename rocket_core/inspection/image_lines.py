"""Lines of calibration files that hold a text each, and may name an image. Loads no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rocket_core.config import CompressionConfig
from rocket_core.errors import CalibrationError
from rocket_core.inspection.block_lists import has_tower
from rocket_core.inspection.dataset_names import local_path_of

MAX_IMAGE_BYTES = 2**28
"""More than any photograph has."""

_IMAGE = "image"
# First bytes of PNG, JPEG, GIF, BMP, TIFF (either order of bytes) and WebP files.
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLine:
    """A line of a `.jsonl` file.

    Attributes:
        where: names file and line in messages.
        text: its text.
        image: the image that it names; None for text alone.
    """

    where: str
    text: str
    image: Path | None


def image_lines(path: Path, name: str | None = None) -> Iterator[ImageLine]:
    """Yield the lines of a `.jsonl` file, with images in its folder or below.

    Args:
        path: the file.
        name: its name in messages; None for the path.

    Raises:
        CalibrationError: a line is damaged, or names an image that does not exist or is elsewhere.
    """
    folder = path.resolve().parent
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{name or path}, line {number}"
                record, text = read_line(line, where=where)
                yield ImageLine(where=where, text=text, image=_image_of(record, folder, where))


def first_image(dataset: str) -> ImageLine | None:
    """Return the first line of a data set that names an image; None if it is not a `.jsonl` file, or none does."""
    path = local_path_of(dataset)
    if path is None or path.suffix.lower() != ".jsonl":
        return None
    return next((line for line in image_lines(path) if line.image is not None), None)


def names_images(path: Path) -> bool:
    """Return whether a `.jsonl` file names an image; False for a damaged file, which is refused when it is read."""
    try:
        return any(line.image is not None for line in image_lines(path))
    except (CalibrationError, OSError):
        return False


def check_images(
    settings: Mapping[str, Any],
    config: CompressionConfig,
    model: str,
    *,
    name: str | None = None,
    most_lines: int | None = None,
) -> None:
    """Raise an error if the images of calibration data cannot be used, or are needed and missing.

    Args:
        settings: the content of the model's config.json.
        config: the compression.
        model: name of the model in messages.
        name: name of the data in messages; None for their path.
        most_lines: how many lines to read; None for all.

    Raises:
        CalibrationError: a line is damaged, names an image that cannot be read, or has none where the tower is
            calibrated; or the model reads no images with text.
    """
    dataset = config.calibration.dataset
    path = local_path_of(dataset)
    has_lines = path is not None and path.suffix.lower() == ".jsonl"
    found = False
    for line in islice(image_lines(path, name), most_lines) if path is not None and has_lines else ():
        if line.image is not None:
            found = True
            if not has_tower(settings):
                raise CalibrationError(
                    f"{line.where} names an image, and {model} reads no images with text; give lines without one"
                )
            _check_file(line.image, line.where)
        elif config.includes_vision:
            raise without_image(line)
    if config.includes_vision and not found:
        raise CalibrationError(
            f"include vision: the tower is calibrated on images, and {name or dataset} has none; give a .jsonl file "
            'with {"image": "...", "text": "..."} in every line'
        )


def without_image(line: ImageLine) -> CalibrationError:
    """Return the error for a line of text alone where the tower is calibrated."""
    return CalibrationError(
        f"{line.where} has no image, and include vision calibrates the tower on each sample; leave the line out"
    )


def read_line(line: bytes, *, where: str) -> tuple[Mapping[str, Any], str]:
    """Return the JSON object on a line of a `.jsonl` file, and its text.

    Args:
        line: the line.
        where: names file and line in messages.

    Raises:
        CalibrationError: not UTF-8, or not a JSON object with a string `text`.
    """
    try:
        record = json.loads(decoded(line, where=where))
    except ValueError as error:
        raise CalibrationError(
            f'{where} is not valid JSON ({error}); each line must be like {{"text": "..."}}'
        ) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise CalibrationError(f'{where} has no string "text"; each line must be like {{"text": "..."}}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which tokenizers reject.
        raise CalibrationError(f'{where}: "text" holds a lone surrogate, which is no character; remove it') from error
    return record, text


def decoded(piece: bytes, *, where: str) -> str:
    """Return text from UTF-8.

    Args:
        piece: a line or a file.
        where: names it in messages.

    Raises:
        CalibrationError: it is not UTF-8.
    """
    try:
        return piece.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{where} is not UTF-8 text (byte {piece[error.start]:#04x} at offset {error.start}); convert it to UTF-8"
        ) from error


def _image_of(record: Mapping[str, Any], folder: Path, where: str) -> Path | None:
    name = record.get(_IMAGE)
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise CalibrationError(f'{where}: "image" is not the path of a file; write {{"image": "...", "text": "..."}}')
    image = (folder / name).resolve()
    if not image.is_relative_to(folder):
        raise CalibrationError(
            f"{where} names the image {name!r}, which is not in the folder of the file; paths are relative to it"
        )
    if not image.is_file():
        raise CalibrationError(f"{where} names the image {name!r}, which does not exist; correct the path")
    return image


def _check_file(image: Path, where: str) -> None:
    size = image.stat().st_size
    with image.open("rb") as file:
        start = file.read(4)
    if not start.startswith(_SIGNATURES):
        raise CalibrationError(f"{where} names {image.name!r}, which cannot be read as an image; repair or remove it")
    if size > MAX_IMAGE_BYTES:
        raise CalibrationError(
            f"{where} names {image.name!r}, which has {size:,} bytes; images may have {MAX_IMAGE_BYTES:,}"
        )
