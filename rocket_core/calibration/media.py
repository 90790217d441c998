"""Calibration images and audio, from a folder of files or generated from a seed."""

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from rocket_core.errors import CalibrationError, EmptyCalibrationError

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
AUDIO_SUFFIXES = (".wav",)

_SAMPLE_BYTES = 2


def media_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of a folder with one of these suffixes, ignoring case, sorted by name.

    Raises:
        EmptyCalibrationError: the folder has no such file.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes and file.is_file())
    if not files:
        raise EmptyCalibrationError(
            f"the folder {folder} holds no {' or '.join(suffixes)} file; give one with calibration data at its top"
        )
    return files


def folder_images(folder: Path, *, seed: int) -> Iterator[Any]:
    """Yield the images of a folder, as RGB, in an order determined by the seed.

    Raises:
        EmptyCalibrationError: the folder has no image.
        CalibrationError: a file is not a readable image, or Pillow is not installed.
    """
    files = media_files(folder, IMAGE_SUFFIXES)
    for index in np.random.default_rng(seed).permutation(len(files)):
        yield read_image(files[index])


def read_image(file: Path) -> Any:
    """Return an image as RGB.

    Raises:
        CalibrationError: the file is not a readable image, or Pillow is not installed.
    """
    library = pillow()
    try:
        with library.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        raise CalibrationError(
            f"{file} cannot be read as an image ({type(error).__name__}); repair or remove it"
        ) from error


def synthetic_images(side: int, *, seed: int) -> Iterator[Any]:
    """Yield random images indefinitely: overlapping discs of random position, size and colour.

    Their edges and their spectrum resemble those of photographs; they depict nothing.

    Args:
        side: width and height in pixels.
        seed: at least 0.
    """
    library = pillow()
    generator = np.random.default_rng(seed)
    while True:
        yield library.fromarray(_discs(side, generator))


def folder_audio(folder: Path, *, seed: int, rate: int) -> Iterator[Float32[np.ndarray, " samples"]]:
    """Yield the recordings of a folder in an order determined by the seed.

    Args:
        folder: contains `.wav` files: PCM, mono, 16 bits.
        seed: at least 0.
        rate: the model's sampling rate, in Hz.

    Yields:
        Amplitudes in [-1, 1).

    Raises:
        EmptyCalibrationError: the folder has no recording.
        CalibrationError: a file has another format or rate, or is damaged.
    """
    files = media_files(folder, AUDIO_SUFFIXES)
    for index in np.random.default_rng(seed).permutation(len(files)):
        yield read_recording(files[index], rate)


def read_recording(file: Path, rate: int) -> Float32[np.ndarray, " samples"]:
    """Return the amplitudes of a `.wav` file, in [-1, 1).

    Args:
        file: PCM, mono, 16 bits.
        rate: the model's sampling rate, in Hz.

    Raises:
        CalibrationError: the file has another format or rate, or is damaged.
    """
    try:
        with wave.open(str(file), "rb") as recording:
            layout = recording.getnchannels(), recording.getsampwidth(), recording.getframerate()
            data = recording.readframes(recording.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise CalibrationError(f"{file} cannot be read as a .wav file ({error}); convert it to 16-bit PCM") from error
    if layout != (1, _SAMPLE_BYTES, rate):
        channels, width, frames = layout
        raise CalibrationError(
            f"{file} has {channels} channels of {8 * width} bits at {frames} Hz; the model hears one channel of 16 "
            f"bits at {rate} Hz: convert it"
        )
    length = len(data) - len(data) % _SAMPLE_BYTES
    return np.frombuffer(data[:length], dtype="<i2").astype(np.float32) / 2**15


def synthetic_audio(length: int, *, seed: int, rate: int) -> Iterator[Float32[np.ndarray, " samples"]]:
    """Yield synthetic recordings indefinitely: a tone of varying pitch with overtones, in syllables, pauses, and noise.

    Args:
        length: samples per recording.
        seed: at least 0.
        rate: sampling rate, in Hz.
    """
    generator = np.random.default_rng(seed)
    while True:
        yield _hum(length, rate, generator)


def pillow() -> Any:
    """Return Pillow's `Image` module.

    Raises:
        CalibrationError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise CalibrationError(
            "calibration on images needs Pillow, which is not installed; pip install 'rocket-compress[vision]'"
        ) from error
    return Image


def _discs(side: int, generator: np.random.Generator) -> UInt8[np.ndarray, "side side 3"]:
    image = np.full((side, side, 3), generator.integers(256, size=3), dtype=np.float64)
    rows, columns = np.ogrid[:side, :side]
    for _ in range(100):
        # Radii between a thirtieth of the image and all of it, log-uniform: most discs are small, as in photographs.
        radius = side * (1 / 30) ** generator.random()
        row, column = generator.uniform(0, side, size=2)
        image[(rows - row) ** 2 + (columns - column) ** 2 < radius**2] = generator.integers(256, size=3)
    image += generator.normal(scale=4.0, size=image.shape)
    return image.clip(0, 255).astype(np.uint8)


def _hum(length: int, rate: int, generator: np.random.Generator) -> Float32[np.ndarray, " samples"]:
    seconds = np.arange(length) / rate
    knots = np.linspace(0, seconds[-1], max(2, int(4 * length / rate)))
    pitch = np.interp(seconds, knots, generator.uniform(80, 250, size=len(knots)))
    loudness = np.interp(seconds, knots, generator.uniform(-0.3, 1.0, size=len(knots))).clip(0)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    tone = sum(np.sin(harmonic * phase + generator.uniform(0, 6)) / harmonic for harmonic in range(1, 16))
    sound = 0.2 * loudness * tone + generator.normal(scale=0.005, size=length)
    return np.asarray(sound.clip(-1, 1), dtype=np.float32)
