"""Calibration on text with images or audio, for models that read both: a `.jsonl` file and the files that it names."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocket_core.calibration.media import read_image, read_recording
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.config import CalibrationConfig
from rocket_core.errors import CalibrationError, EmptyCalibrationError
from rocket_core.inspection.checks.media_lines import MediaLine, Medium, line_text, media_lines, without_image
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.models.pretrained import TEMPLATE_SECONDS, interpreting


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaWithText:
    """Texts with an image or a recording each, or without, prepared by the model's own processor. No sample is padded.

    If the model has a chat template, a sample is a user's message: the image or audio, then the text. Otherwise it is
    the placeholder of an image or of audio, a line break, and the text. A text that has the placeholder is taken as it
    is.

    Attributes:
        processor: the model's processor.
        medium: what the lines name.
        length: most tokens of a sample; the rest of a longer text is left out.
        placeholders: ids of tokens that stand for parts of an image or of audio.
        with_image: whether lines of text alone are refused, because the tower is calibrated.
    """

    processor: Any
    medium: Medium
    length: int
    placeholders: frozenset[int]
    with_image: bool = False

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:  # noqa: ARG002
        """See `InputSource`."""
        path = local_path_of(settings.dataset)
        assert path is not None, "other data sets name no files"
        lines = list(media_lines(path))
        order = np.random.default_rng(settings.seed).permutation(len(lines))
        samples = [self._prepared(lines[index]) for index in order[: settings.samples]]
        if not samples:
            raise EmptyCalibrationError(f"calibration file {path} holds no text; give one with at least one document")
        return CalibrationInputs.separate(samples)

    def _prepared(self, line: MediaLine) -> dict[str, Tensor]:
        if self.with_image and line.medium != "image":
            raise without_image(line)
        read = self._read(line)
        with interpreting(f"the model's processor, on {line.where}", CalibrationError, seconds=TEMPLATE_SECONDS):
            found = self.processor(text=[self._prompt(line)], return_tensors="pt", **read)
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        tokens = tensors["input_ids"]
        # Nothing is padded.
        tensors.pop("attention_mask", None)
        if tokens.shape[1] > self.length:
            self._check_cut(tokens[0, self.length :], line)
            tensors = {
                # A mask of audio has a number for each frame.
                name: value[:, : self.length] if value.shape == tokens.shape and "mask" not in name else value
                for name, value in tensors.items()
            }
        return tensors

    def _read(self, line: MediaLine) -> dict[str, Any]:
        """Return the arguments of the processor for the file that a line names."""
        if self.medium == "image":
            return {"images": None if line.file is None else [read_image(line.file)]}
        if line.file is None:
            return {"audio": None}
        rate = int(self.processor.feature_extractor.sampling_rate)
        return {"audio": [read_recording(line.file, rate)], "sampling_rate": rate}

    def _prompt(self, line: MediaLine) -> str:
        placeholder: str = self.processor.image_token if self.medium == "image" else self.processor.audio_token
        if line.file is None or placeholder in line.text:
            return line.text or line_text(line.fields, line.where)
        if not self.processor.chat_template:
            return f"{placeholder}\n{line.text}"
        content = [{"type": self.medium}, {"type": "text", "text": line.text}]
        prompt: str = self.processor.apply_chat_template([{"role": "user", "content": content}])
        return prompt

    def _check_cut(self, rest: Tensor, line: MediaLine) -> None:
        if bool(torch.isin(rest, torch.tensor(sorted(self.placeholders))).any()):
            raise CalibrationError(
                f"{line.where}: the {self.medium} takes more than the {self.length} tokens of a sample; raise the "
                f"sequence length, or give {'a smaller image' if self.medium == 'image' else 'less of it'}"
            )
