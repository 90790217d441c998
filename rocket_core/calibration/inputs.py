"""Calibration inputs for every kind of model.

There is one source per kind; each returns samples as tensors, keyed by argument of the model's forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedTokenizerBase

from rocket_core.calibration.chats import RowReader
from rocket_core.calibration.datasets import document_windows, documents, token_windows
from rocket_core.calibration.media import folder_audio, folder_images, pillow, synthetic_audio, synthetic_images
from rocket_core.calibration.media_text import MediaWithText
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.calibration.token_loss import placeholder_ids
from rocket_core.config import BUILTIN_DATASET, SYNTHETIC_DATASET, CalibrationConfig, HealingConfig
from rocket_core.errors import (
    CalibrationError,
    EmptyCalibrationError,
    InvalidConfigError,
    UnsupportedArchitectureError,
)
from rocket_core.inspection.checks.media_lines import Medium, first_medium
from rocket_core.models.architecture import Architecture
from rocket_core.models.pretrained import (
    TEMPLATE_SECONDS,
    interpreting,
    load_media_processor,
    load_processor,
    load_tokenizer,
    tokenize,
)

# Image side, in pixels, for models that accept any size.
_DEFAULT_SIDE = 224


@runtime_checkable
class InputSource(Protocol):
    """A source of calibration inputs for one model."""

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:
        """Draw samples.

        Args:
            settings: data set, number of samples, and seed.
            token: Hub token, for gated text; None uses the token of this machine's user, if any.

        Returns:
            At most `settings.samples` samples; fewer if the data run out.

        Raises:
            CalibrationError: the data are too few, damaged, or not of the model's kind.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderText:
    """Windows of running text, without special tokens around each window, or one of each document.

    Attributes:
        tokenizer: the model's tokenizer.
        length: tokens per window.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:
        """See `InputSource`."""
        reader = row_reader(settings, self.tokenizer)
        texts = documents(settings.dataset, seed=settings.seed, token=token, reader=reader)
        if settings.pack:
            inputs = CalibrationInputs.of_text(
                token_windows(texts, self.tokenizer, count=settings.samples, length=self.length)
            )
        else:
            windows = document_windows(texts, self.tokenizer, count=settings.samples, length=self.length)
            inputs = CalibrationInputs.separate([{"input_ids": window} for window in windows])
        return replace(inputs, rows=reader.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderText:
    """Windows of running text between the special tokens that the tokenizer puts around a text, without padding.

    Attributes:
        tokenizer: the model's tokenizer.
        length: tokens per window, special tokens included.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:
        """See `InputSource`."""
        _check_packed(settings)
        reader = row_reader(settings, self.tokenizer)
        texts = documents(settings.dataset, seed=settings.seed, token=token, reader=reader)
        windows = self.windows(texts, settings.samples)
        return CalibrationInputs(tensors={"input_ids": windows}, rows=reader.counts)

    def windows(self, texts: Iterable[str], count: int) -> Int64[Tensor, "windows length"]:
        """Return at most `count` windows of the texts."""
        before, after = _special_tokens(self.tokenizer)
        room = self.length - len(before) - len(after)
        if room < 1:
            raise InvalidConfigError(
                f"sequence length is {self.length}, and the tokenizer adds {len(before) + len(after)} tokens to every "
                "text; ask for more"
            )
        tokens = token_windows(texts, self.tokenizer, count=count, length=room)
        ends = [torch.tensor(ids, dtype=torch.int64).expand(len(tokens), -1) for ids in (before, after)]
        return torch.cat([ends[0], tokens, ends[1]], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedText:
    """Pairs of windows for a text encoder-decoder: the encoder reads a window, the decoder the one that follows.

    This corresponds to training with a prefix language model objective, so the text that the decoder reads is
    consistent with what it attends to. The decoder's input is shifted right: the start token, then all but the last
    token of its window.

    Attributes:
        text: source of the windows.
        start: the decoder's start token.

    References:
        Raffel et al., Exploring the Limits of Transfer Learning, 2020, section 3.2 (prefix language model).
    """

    text: EncoderText
    start: int

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:
        """See `InputSource`."""
        _check_packed(settings)
        reader = row_reader(settings, self.text.tokenizer)
        texts = documents(settings.dataset, seed=settings.seed, token=token, reader=reader)
        windows = self.text.windows(texts, 2 * settings.samples)
        pairs = windows[: len(windows) // 2 * 2].reshape(-1, 2, self.text.length)
        if not len(pairs):
            raise EmptyCalibrationError(
                f"the text fills one window of {self.text.length} tokens, and an encoder-decoder needs two; give more "
                "text or a shorter sequence length"
            )
        return CalibrationInputs(
            tensors={
                "input_ids": pairs[:, 0].contiguous(),
                "decoder_input_ids": shift_right(pairs[:, 1], self.start),
            },
            rows=reader.counts,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images prepared by the model's own processor.

    Attributes:
        processor: the image processor.
        side: image side that the model requires, in pixels; None if it accepts any.
    """

    processor: Any
    side: int | None

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:  # noqa: ARG002
        """See `InputSource`."""
        if settings.dataset == SYNTHETIC_DATASET:
            images = synthetic_images(self.side or _DEFAULT_SIDE, seed=settings.seed)
        else:
            images = folder_images(Path(settings.dataset), seed=settings.seed)
        pixels = [self._prepared(image) for image in islice(images, settings.samples)]
        shapes = {tuple(image.shape) for image in pixels}
        if len(shapes) > 1:
            raise CalibrationError(
                f"the model's image processor gives images of different sizes ({', '.join(map(str, sorted(shapes)))}); "
                "give images of one size"
            )
        return CalibrationInputs(tensors={"pixel_values": torch.stack(pixels)})

    def _prepared(self, image: Any) -> Float32[Tensor, "channels height width"]:
        with interpreting("preprocessor_config.json of the model", seconds=TEMPLATE_SECONDS):
            pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        if self.side is not None and max(pixels.shape[-2:]) != self.side:
            raise CalibrationError(
                f"the image processor gives {pixels.shape[-2]} x {pixels.shape[-1]} pixels, the model takes "
                f"{self.side}; preprocessor_config.json does not belong to the model"
            )
        return pixels.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Audio:
    """Audio in windows of the model's input length, cut from concatenated recordings, so that nothing is padded.

    The decoder reads built-in text: transcripts are not required from the user, and a model that runs block by block
    cannot generate them.

    Attributes:
        extractor: the model's feature extractor.
        features: shape of one sample of the model's input: bins and frames.
        text: source of the windows that the decoder reads.
        start: the decoder's start token.
    """

    extractor: Any
    features: tuple[int, int]
    text: EncoderText
    start: int

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:  # noqa: ARG002
        """See `InputSource`."""
        length, rate = int(self.extractor.n_samples), int(self.extractor.sampling_rate)
        if settings.dataset == SYNTHETIC_DATASET:
            recordings = synthetic_audio(length, seed=settings.seed, rate=rate)
        else:
            recordings = folder_audio(Path(settings.dataset), seed=settings.seed, rate=rate)
        heard = [self._prepared(window, rate) for window in islice(_windows(recordings, length), settings.samples)]
        if not heard:
            raise EmptyCalibrationError(
                f"the recordings of {settings.dataset} together are shorter than the {length / rate:g} s that the "
                "model hears; give more"
            )
        # The decoder's text does not depend on the audio.
        read = self.text.windows(documents(BUILTIN_DATASET, seed=settings.seed), len(heard))
        samples = min(len(heard), len(read))
        return CalibrationInputs(
            tensors={
                "input_features": torch.stack(heard[:samples]),
                "decoder_input_ids": shift_right(read[:samples], self.start),
            }
        )

    def _prepared(self, window: Float32[np.ndarray, " samples"], rate: int) -> Float32[Tensor, "bins frames"]:
        with interpreting("preprocessor_config.json of the model", seconds=TEMPLATE_SECONDS):
            features: Tensor = self.extractor(window, sampling_rate=rate, return_tensors="pt")["input_features"][0]
        if tuple(features.shape) != self.features:
            raise CalibrationError(
                f"the feature extractor gives {tuple(features.shape)} features, the model takes {self.features}; "
                "preprocessor_config.json does not belong to the model"
            )
        return features.float()


def open_source(folder: Path, architecture: Architecture, length: int, dataset: str = BUILTIN_DATASET) -> InputSource:
    """Create the input source of a model from its tokenizer or processor.

    Args:
        folder: checkpoint folder.
        architecture: the model.
        length: tokens per window of text.
        dataset: the data set, which may name images or audio for a model that reads text.

    Raises:
        CheckpointFormatError: the folder has no tokenizer or processor that transformers can read.
        CalibrationError: a required library is not installed, or the data names images for a model that reads none.
        UnsupportedArchitectureError: inputs for this model cannot be generated.
    """
    config = architecture.model.config
    if architecture.kind == "images":
        pillow()
        # Results must not depend on which libraries are installed.
        processor = load_processor(AutoImageProcessor, "image processor", folder, backend="pil")
        return Images(processor=processor, side=_longer_side(getattr(config, "image_size", None)))
    tokenizer = load_tokenizer(folder, config)
    medium = _medium_of(dataset, architecture)
    if medium is not None:
        return MediaWithText(
            processor=load_media_processor(folder, config, tokenizer, medium),
            medium=medium,
            length=length,
            placeholders=placeholder_ids(config),
            with_image=any(blocks.in_tower for blocks in architecture.lists),
        )
    if architecture.is_causal:
        return DecoderText(tokenizer=tokenizer, length=length)
    text = EncoderText(tokenizer=tokenizer, length=length)
    if architecture.kind == "audio":
        extractor = load_processor(AutoFeatureExtractor, "feature extractor", folder)
        if not hasattr(extractor, "n_samples") or not hasattr(config, "max_source_positions"):
            raise UnsupportedArchitectureError(
                f"{type(architecture.model).__name__} hears audio of any length; only models with windows of one "
                "length, such as Whisper, can be calibrated"
            )
        features = int(config.num_mel_bins), 2 * int(config.max_source_positions)
        return Audio(extractor=extractor, features=features, text=text, start=_start_token(architecture))
    return PairedText(text=text, start=_start_token(architecture)) if config.is_encoder_decoder else text


def row_reader(settings: CalibrationConfig | HealingConfig, tokenizer: PreTrainedTokenizerBase) -> RowReader:
    """Return how the rows of calibration data become texts of a model."""
    return RowReader(tokenizer=tokenizer, column=settings.column, skip_bad_rows=settings.skip_bad_rows)


def _check_packed(settings: CalibrationConfig) -> None:
    if not settings.pack:
        raise InvalidConfigError("pack is false, and only models that predict the next token read a document a window")


def _medium_of(dataset: str, architecture: Architecture) -> Medium | None:
    """Return what a data set names next to texts; None for text alone."""
    line = first_medium(dataset)
    if line is None:
        return None
    if line.medium == "image":
        if architecture.tower is None:
            raise CalibrationError(
                f"{line.where} names an image, and {type(architecture.model).__name__} reads no images with text; give "
                "lines without one"
            )
        pillow()
    return line.medium


def shift_right(labels: Int64[Tensor, "windows tokens"], start: int) -> Int64[Tensor, "windows decoder_tokens"]:
    """Return a decoder's input for predicting `labels`: the start token, then all labels but the last.

    Labels that already begin with the start token, as Whisper's tokenizer returns them, do not get another.
    """
    if bool((labels[:, 0] == start).all()):
        return labels[:, :-1].contiguous()
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)


def _windows(recordings: Iterable[np.ndarray], length: int) -> Iterator[Float32[np.ndarray, " length"]]:
    """Yield windows of the concatenated recordings; an incomplete last window is dropped."""
    rest = np.empty(0, dtype=np.float32)
    for recording in recordings:
        rest = np.concatenate([rest, recording])
        while len(rest) >= length:
            yield rest[:length]
            rest = rest[length:]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    full: list[int] = tokenize(tokenizer, "a")["input_ids"]
    bare: list[int] = tokenize(tokenizer, "a", add_special_tokens=False)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _start_token(architecture: Architecture) -> int:
    """Return what the decoder reads first, as in generation: T5Gemma, for example, names no other token for it."""
    config = architecture.model.config
    tokens = (
        getattr(config, "decoder_start_token_id", None),
        getattr(config.get_text_config(decoder=True), "bos_token_id", None),
    )
    token = next((token for token in tokens if isinstance(token, int)), None)
    if token is None:
        raise CalibrationError(
            "config.json has neither decoder_start_token_id nor bos_token_id, so that what the decoder reads cannot "
            "begin; add the first"
        )
    return token


def _longer_side(size: object) -> int | None:
    sides = size if isinstance(size, list | tuple) else [size]
    return max((side for side in sides if isinstance(side, int)), default=None)
