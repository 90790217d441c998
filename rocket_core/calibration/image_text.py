"""Calibration on text with images, for models that read both: a `.jsonl` file and the images that it names."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocket_core.calibration.media import read_image
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.config import CalibrationConfig
from rocket_core.errors import CalibrationError, EmptyCalibrationError
from rocket_core.inspection.dataset_names import local_path_of
from rocket_core.inspection.image_lines import ImageLine, image_lines, without_image
from rocket_core.models.pretrained import interpreting


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesWithText:
    """Texts with an image each, or without, prepared by the model's own processor. No sample is padded.

    If the model has a chat template, a sample is a user's message: the image, then the text. Otherwise it is the
    placeholder of an image, a line break, and the text. A text that has the placeholder is taken as it is.

    Attributes:
        processor: the model's processor.
        length: most tokens of a sample; the rest of a longer text is left out.
        placeholders: ids of tokens that stand for parts of an image.
        with_image: whether lines of text alone are refused, because the tower is calibrated.
    """

    processor: Any
    length: int
    placeholders: frozenset[int]
    with_image: bool = False

    def draw(self, settings: CalibrationConfig, *, token: str | None = None) -> CalibrationInputs:  # noqa: ARG002
        """See `InputSource`."""
        path = local_path_of(settings.dataset)
        assert path is not None, "other data sets have no images"
        lines = list(image_lines(path))
        order = np.random.default_rng(settings.seed).permutation(len(lines))
        samples = [self._prepared(lines[index]) for index in order[: settings.samples]]
        if not samples:
            raise EmptyCalibrationError(f"calibration file {path} holds no text; give one with at least one document")
        return CalibrationInputs.separate(samples)

    def _prepared(self, line: ImageLine) -> dict[str, Tensor]:
        if self.with_image and line.image is None:
            raise without_image(line)
        images = None if line.image is None else [read_image(line.image)]
        with interpreting(f"the model's processor, on {line.where}", CalibrationError):
            found = self.processor(text=[self._prompt(line)], images=images, return_tensors="pt")
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        tokens = tensors["input_ids"]
        # Nothing is padded.
        tensors.pop("attention_mask", None)
        if tokens.shape[1] > self.length:
            self._check_cut(tokens[0, self.length :], line)
            tensors = {
                name: value[:, : self.length] if value.shape == tokens.shape else value
                for name, value in tensors.items()
            }
        return tensors

    def _prompt(self, line: ImageLine) -> str:
        placeholder: str = self.processor.image_token
        if line.image is None or placeholder in line.text:
            return line.text
        if not self.processor.chat_template:
            return f"{placeholder}\n{line.text}"
        content = [{"type": "image"}, {"type": "text", "text": line.text}]
        prompt: str = self.processor.apply_chat_template([{"role": "user", "content": content}])
        return prompt

    def _check_cut(self, rest: Tensor, line: ImageLine) -> None:
        if bool(torch.isin(rest, torch.tensor(sorted(self.placeholders))).any()):
            raise CalibrationError(
                f"{line.where}: the image takes more than the {self.length} tokens of a sample; raise the sequence "
                "length, or give a smaller image"
            )


def placeholder_ids(config: Any) -> frozenset[int]:
    """Return the ids of tokens that a model replaces by parts of an image."""
    found = getattr(config, "image_token_id", None)
    return frozenset() if found is None else frozenset({int(found)})
