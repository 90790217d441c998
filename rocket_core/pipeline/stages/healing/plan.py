"""The text of healing, drawn before long work starts."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from rocket_core.calibration.inputs import DecoderText
from rocket_core.checkpoint import open_checkpoint
from rocket_core.config import CalibrationConfig, HealingConfig
from rocket_core.errors import EmptyCalibrationError
from rocket_core.estimates.healing import MOST_HELD_OUT, HealingSizes, HealingWork, held_out_windows
from rocket_core.evaluation import ModelFolder
from rocket_core.evaluation.windows import batch_size
from rocket_core.healing import HealingText, Schedule
from rocket_core.inspection.checks.preconditions import cannot_heal
from rocket_core.inspection.files.dataset_names import local_path_of
from rocket_core.models.architecture import Architecture, window_length


@dataclass(frozen=True, kw_only=True, slots=True)
class HealingPlan:
    """Healing with all text that it reads.

    Attributes:
        windows: all windows, in the order in which they were drawn.
        text: the same, those that are held out apart.
        schedule: batches and learning rates.
        dataset: name of the text, without its folder.
        blocks: module names of the model's blocks.
        sizes: sizes of the model.
    """

    windows: Int64[Tensor, "windows length"]
    text: HealingText
    schedule: Schedule
    dataset: str
    blocks: tuple[str, ...]
    sizes: HealingSizes

    @property
    def length(self) -> int:
        """Tokens per window."""
        return int(self.text.training.shape[1])

    @property
    def step_tokens(self) -> int:
        """Tokens that a step reads."""
        return self.schedule.windows_per_step * self.length

    @property
    def call_tokens(self) -> int:
        """Tokens that a call of a model reads."""
        return min(self.schedule.windows_per_step, self.text.rows) * self.length

    @property
    def work(self) -> HealingWork:
        """What its time depends on."""
        return HealingWork(
            steps=self.schedule.steps,
            tokens=self.schedule.steps * self.step_tokens,
            held_out_tokens=self.text.held_out.numel(),
            length=self.length,
            vocabulary=self.sizes.vocabulary,
            trained=self.sizes.trained,
            recomputes=self.sizes.recomputes(self.call_tokens),
        )


def plan_healing(
    original: ModelFolder,
    architecture: Architecture,
    settings: HealingConfig,
    *,
    windows: Int64[Tensor, "windows length"] | None = None,
    token: str | None = None,
) -> HealingPlan:
    """Draw the text, so that problems with it are reported early.

    Args:
        original: the dense model.
        architecture: its structure.
        settings: amount and choice of text.
        windows: the windows that a resumed run has drawn; None draws them.
        token: the Hub's token, for gated data; None uses that of this machine's user, if any.

    Raises:
        UnsupportedArchitectureError: the model does not predict tokens.
        InvalidConfigError: the sequence length is out of range.
        CalibrationError: the text is too short or malformed.
        HubUnavailableError: the text cannot be fetched from the Hub.
    """
    if not original.predicts_tokens:
        raise cannot_heal(original.path.name)
    length = window_length(original.config, settings.sequence_length)
    if windows is None:
        windows = _draw(original, settings, length, token)
    if len(windows) < 2:
        raise EmptyCalibrationError(
            f"healing needs at least two windows of {length} tokens, one of them held out, and the text of "
            f"{settings.dataset!r} fills {len(windows)}; give more text or a shorter sequence length"
        )
    held_out = held_out_windows(len(windows), math.ceil(settings.tokens / length))
    training = torch.ones(len(windows), dtype=torch.bool)
    # Spread over the text, as neighbours are often from one document.
    training[(2 * torch.arange(held_out) + 1) * len(windows) // (2 * held_out)] = False
    path = local_path_of(settings.dataset)
    return HealingPlan(
        windows=windows,
        text=HealingText(
            training=windows[training],
            held_out=windows[~training],
            rows=batch_size(original.config, length),
        ),
        schedule=Schedule.of(settings.tokens, windows=len(windows) - held_out, length=length, seed=settings.seed),
        dataset=settings.dataset if path is None else path.name,
        blocks=tuple(architecture.block_name(index) for index in range(len(architecture.layers))),
        sizes=HealingSizes(
            parameters=architecture.parameters,
            trained=architecture.compressible_parameters,
            blocks=len(architecture.layers),
            hidden_size=int(original.config.get_text_config().hidden_size),
            vocabulary=architecture.vocabulary,
            stored_bytes=open_checkpoint(original.path).stored_bytes,
        ),
    )


def windows_to_draw(settings: HealingConfig, length: int) -> int:
    """Return the number of windows that healing reads at most, held-out ones included."""
    return math.ceil(settings.tokens / length) + MOST_HELD_OUT


def _draw(original: ModelFolder, settings: HealingConfig, length: int, token: str | None) -> Tensor:
    source = DecoderText(tokenizer=original.tokenizer, length=length)
    samples = windows_to_draw(settings, length)
    choice = CalibrationConfig(
        dataset=settings.dataset,
        column=settings.column,
        skip_bad_rows=settings.skip_bad_rows,
        samples=samples,
        seed=settings.seed,
    )
    return source.draw(choice, token=token).tensors["input_ids"]
