"""What a compression was calibrated on. Loads no torch."""

from collections.abc import Collection

from rocket_core.config import CalibrationKind
from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.report.formatting import percent_text
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
    reached_tokens: int | None = None
    """different tokens among them; null where no tokens were read, and in reports from before this field existed."""
    vocabulary: int | None = None
    """tokens that the model knows; null as above."""

    def reach(self, experts: Collection[int]) -> str | None:
        """Return what of the model the data reach, and what to do about the rest; None if that is not known.

        Args:
            experts: tokens that were routed to each expert of a mixture.
        """
        if self.reached_tokens is None or self.vocabulary is None:
            return None
        part = percent_text(self.reached_tokens / self.vocabulary)
        said = [f"the calibration data have {self.reached_tokens:,} of the {self.vocabulary:,} known tokens ({part})"]
        if experts:
            used = sum(count > 0 for count in experts)
            said.append(f"reach {used:,} of {len(experts):,} experts")
        if self.text is not None:
            said.append(
                f"have a perplexity of {self.text.perplexity:.3g}, where the model itself expects "
                f"{self.text.own_perplexity:.3g}"
            )
        listed = f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]
        return (
            f"{listed[0].upper()}{listed[1:]}. Languages, code or chats that they lack may lose more: add some of each"
        )

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
