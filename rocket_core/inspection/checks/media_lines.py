"""Lines of calibration files that hold a text each, and may name an image or a recording. Loads no torch."""

import wave
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rocket_core.config import CompressionConfig
from rocket_core.errors import CalibrationError
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.inspection.files.text_rows import TEXT_COLUMN, Row, checked_text, read_record, row_document
from rocket_core.inspection.headers.block_lists import has_tower
from rocket_core.inspection.headers.layer_names import family_of

MAX_FILE_BYTES = 2**28
"""More than any photograph has, and than recordings that a model reads as one sample."""

Medium = Literal["image", "audio"]

_MEDIA: tuple[Medium, ...] = ("image", "audio")
_WITH_ARTICLE = {"image": "an image", "audio": "audio"}
# First bytes of PNG, JPEG, GIF, BMP, TIFF (either order of bytes) and WebP files.
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")
_SAMPLE_BYTES = 2
# Families that read audio, but not here.
_UNREADABLE = {
    "voxtral": "transformers prepares audio for it only with the tokenizer of mistral-common",
    "granite_speech": "its feature extractor needs torchaudio, with which it was not tested",
    "vibevoice": "it makes audio, and hears none",
    "vibevoice_asr": "its encoders add random numbers to what they hear, so that runs could not be resumed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLine:
    """A line of a `.jsonl` file.

    Attributes:
        where: names file and line in messages.
        fields: its JSON object.
        text: its text, if it names a file.
        medium: what kind of file it names; None for text alone.
        file: the image or recording; None for text alone.
    """

    where: str
    fields: Mapping[str, Any]
    text: str = ""
    medium: Medium | None = None
    file: Path | None = None


def media_lines(path: Path, name: str | None = None) -> Iterator[MediaLine]:
    """Yield the lines of a `.jsonl` file, with images and recordings in its folder or below.

    Args:
        path: the file.
        name: its name in messages; None for the path.

    Raises:
        CalibrationError: a line is damaged, or names a file that does not exist or is elsewhere, or two.
    """
    folder = path.resolve().parent
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{name or path}, line {number}"
                record = read_record(line, where=where)
                named = [medium for medium in _MEDIA if record.get(medium) is not None]
                if len(named) > 1:
                    raise CalibrationError(f"{where} names an image and audio; give each its own line")
                medium = named[0] if named else None
                if medium is None:
                    yield MediaLine(where=where, fields=record)
                    continue
                found = _named_file(record, medium, folder, where)
                yield MediaLine(where=where, fields=record, text=line_text(record, where), medium=medium, file=found)


def first_medium(dataset: str) -> MediaLine | None:
    """Return the first line of a data set that names a file; None if it is not a `.jsonl` file, or none does."""
    path = local_path_of(dataset)
    if path is None or path.suffix.lower() != ".jsonl":
        return None
    return next((line for line in media_lines(path) if line.file is not None), None)


def names_media(path: Path) -> bool:
    """Return whether a `.jsonl` file names others; False for a damaged file, which is refused when it is read."""
    try:
        return any(line.file is not None for line in media_lines(path))
    except (CalibrationError, OSError):
        return False


def check_media(
    settings: Mapping[str, Any],
    config: CompressionConfig,
    model: str,
    *,
    name: str | None = None,
    most_lines: int | None = None,
) -> None:
    """Raise an error if the files that calibration data name cannot be used, or are needed and missing.

    Args:
        settings: the content of the model's config.json.
        config: the compression.
        model: name of the model in messages.
        name: name of the data in messages; None for their path.
        most_lines: how many lines to read; None for all.

    Raises:
        CalibrationError: a line is damaged, names a file that cannot be read, or no image where the tower is
            calibrated; the model does not read such files with text; or some lines name images and others audio.
    """
    dataset = config.calibration.dataset
    path = local_path_of(dataset)
    has_lines = path is not None and path.suffix.lower() == ".jsonl"
    medium: Medium | None = None
    for line in islice(media_lines(path, name), most_lines) if path is not None and has_lines else ():
        if config.includes_vision and line.medium != "image":
            raise without_image(line)
        if line.medium is None or line.file is None:
            if not config.calibration.skip_bad_rows:
                row_document(Row(where=line.where, fields=line.fields), config.calibration.column)
            continue
        if medium is None:
            _check_reads(settings, line, model)
        elif medium != line.medium:
            raise CalibrationError(
                f"{line.where} names {_WITH_ARTICLE[line.medium]}, and lines before it {_WITH_ARTICLE[medium]}; give "
                "one kind in a file"
            )
        medium = line.medium
        _check_file(line.file, line.medium, line.where)
    if config.includes_vision and medium is None:
        raise CalibrationError(
            f"include vision: the tower is calibrated on images, and {name or dataset} has none; give a .jsonl file "
            'with {"image": "...", "text": "..."} in every line'
        )


def without_image(line: MediaLine) -> CalibrationError:
    """Return the error for a line of text alone where the tower is calibrated."""
    return CalibrationError(
        f"{line.where} has no image, and include vision calibrates the tower on each sample; leave the line out"
    )


def line_text(record: Mapping[str, Any], where: str) -> str:
    """Return the string `text` of a line that is read with images or audio.

    Raises:
        CalibrationError: the line has no text.
    """
    text = record.get(TEXT_COLUMN)
    if not isinstance(text, str):
        raise CalibrationError(f'{where} has no string "text"; each line must be like {{"text": "..."}}')
    return checked_text(text, where, TEXT_COLUMN)


def _named_file(record: Mapping[str, Any], medium: Medium, folder: Path, where: str) -> Path:
    name = record[medium]
    if not isinstance(name, str) or not name:
        raise CalibrationError(
            f'{where}: "{medium}" is not the path of a file; write {{"{medium}": "...", "text": "..."}}'
        )
    file = (folder / name).resolve()
    if not file.is_relative_to(folder):
        raise CalibrationError(
            f"{where} names the {medium} {name!r}, which is not in the folder of the file; paths are relative to it"
        )
    if not file.is_file():
        raise CalibrationError(f"{where} names the {medium} {name!r}, which does not exist; correct the path")
    return file


def _check_reads(settings: Mapping[str, Any], line: MediaLine, model: str) -> None:
    """Raise an error if a model does not read what a line names together with text."""
    if line.medium == "image" and not has_tower(settings):
        raise CalibrationError(
            f"{line.where} names an image, and {model} reads no images with text; give lines without one"
        )
    if line.medium == "audio":
        hears = isinstance(settings.get("audio_config"), Mapping) and not settings.get("is_encoder_decoder")
        reason = _UNREADABLE.get(family_of(settings) or "", None if hears else "it reads no audio with text")
        if reason is not None:
            raise CalibrationError(
                f"{line.where} names audio, and {model} cannot be calibrated on it: {reason}; give text alone"
            )


def _check_file(file: Path, medium: Medium, where: str) -> None:
    size = file.stat().st_size
    readable: Callable[[Path], bool] = _is_image if medium == "image" else _is_recording
    if not readable(file):
        what = "an image" if medium == "image" else "a recording: a .wav file, PCM, one channel of 16 bits"
        raise CalibrationError(f"{where} names {file.name!r}, which cannot be read as {what}; convert or remove it")
    if size > MAX_FILE_BYTES:
        raise CalibrationError(
            f"{where} names {file.name!r}, which has {size:,} bytes; files may have {MAX_FILE_BYTES:,}"
        )


def _is_image(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4).startswith(_SIGNATURES)


def _is_recording(file: Path) -> bool:
    try:
        with wave.open(str(file), "rb") as recording:
            return (recording.getnchannels(), recording.getsampwidth()) == (1, _SAMPLE_BYTES)
    except (wave.Error, EOFError):
        return False
