"""What a compression was calibrated on. Loads no torch."""

from rocket_core.config import CalibrationKind
from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.schema import FrozenModel

NO_DATASET = "none"
"""Calibration data of a compression without calibration."""


class CalibrationReport(FrozenModel):
    """The calibration data used."""

    kind: CalibrationKind = "text"
    """what the model read; the decoder of an audio model additionally read built-in text."""
    dataset: str
    """name of the data; `synthetic` data are generated, and cost quality; `none` where nothing was calibrated."""
    samples: int
    """windows of text or audio, images, or texts with images; 0 where nothing was calibrated."""
    sequence_length: int
    """tokens per window of text; for images, positions of one image; for texts with images, the most of one."""
    seed: int
    """seed of the choice of samples."""
    tokens: int
    """total positions: tokens, and the positions that audio and images become in the model."""
    token_sha256: str
    """hash of the model's inputs, 64 hexadecimal digits."""
    text: CalibratedText | None = None
    """the original's predictions of the text; None if it does not predict tokens, if no sensitivities were measured,
    and in reports from before this field existed.
    """
    skipped_rows: int = 0
    """rows without text, and chats that the chat template refused, that were skipped."""
    lacks_chats: bool = False
    """whether the model has a chat template, and was calibrated on texts alone."""

    @property
    def summary(self) -> str:
        """What was read, and how it was chosen, in a line."""
        if self.dataset == NO_DATASET:
            return "none: layers were rounded by their weights alone"
        return f"{self.samples} samples of {self.dataset}, {self.tokens:,} tokens, seed {self.seed}"

    @property
    def advice(self) -> str | None:
        """What would be better to calibrate on; None if nothing is known to be."""
        if self.lacks_chats:
            return (
                "the model has a chat template, and was calibrated on plain text; calibrate on chats like those that "
                'it will answer: rows with "messages", which its template renders'
            )
        return None
