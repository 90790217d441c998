"""Time that an evaluation needs, from the sizes of a model and of what it reads. Loads no torch.

Numbers of passes were fitted to processor times on one thread of an AMD EPYC (Zen 5); `python -m benchmarks.duration
--evaluate` compares estimates with measured times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rocket_core.config import BUILTIN_DATASET, CompressionConfig
from rocket_core.estimates.footprint import ModelShape
from rocket_core.estimates.healing import vocabulary
from rocket_core.estimates.operations import FLOAT32_BYTES, Operations, activation_passes
from rocket_core.inspection.checks.preconditions import window_length
from rocket_core.inspection.files.text_rows import text_suffix
from rocket_core.inspection.headers.model_fields import positions

_MODELS = 2
# Passes over the activations of the layers, over the logits of both models, and over weights, to load and prepare them.
_FORWARD_PASSES, _LOGIT_PASSES, _WEIGHT_PASSES = 3, 30, 10
# Operations of attention for each token, hidden unit and token of its window, which take as long as those of products.
_ATTENTION = 8
# Seconds on any machine: to load a model, and for each block and token of an answer.
_LOAD_SECONDS, _TOKEN_SECONDS = 0.1, 0.0004
# Characters of the builtin text, and of a token.
_BUILTIN_CHARACTERS, _TOKEN_CHARACTERS = 36_000, 3.5


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSizes:
    """The sizes that the time of an evaluation depends on.

    Attributes:
        windows: windows of text, at least 1.
        length: tokens in a window.
        stride: tokens from the start of one window to the next.
        vocabulary: logits for each token; 0 for an encoder.
        answer_tokens: tokens of all answers to prompts, at most.
    """

    windows: int
    length: int
    stride: int
    vocabulary: int
    answer_tokens: int = 0

    @classmethod
    def expected(cls, config: CompressionConfig, model: ModelShape, settings: Mapping[str, Any]) -> Self | None:
        """Return the sizes of an evaluation whose text is not read: as many windows as are asked for.

        How long the builtin text and a file on this machine are is known, and taken into account if they fill fewer.

        Args:
            config: the compression.
            model: the model's sizes.
            settings: the content of config.json.

        Returns:
            The sizes; None if no evaluation is requested.
        """
        asked = config.evaluate
        if asked is None:
            return None
        length = window_length(positions(settings), asked.sequence_length)
        stride = min(asked.stride or length, length)
        characters = _characters(asked.dataset)
        fills = asked.samples if characters is None else math.ceil(characters / _TOKEN_CHARACTERS / stride)
        return cls(
            windows=min(asked.samples, fills),
            length=length,
            stride=stride,
            vocabulary=vocabulary(settings, model) if model.predicts else 0,
            answer_tokens=len(asked.prompts) * asked.answer_tokens,
        )


def _characters(dataset: str) -> int | None:
    """Return about how many characters a text has, at least 1; None if that is not known."""
    if dataset == BUILTIN_DATASET:
        return _BUILTIN_CHARACTERS
    path = Path(dataset)
    return max(1, path.stat().st_size) if text_suffix(path) is not None and path.is_file() else None


def evaluation_operations(model: ModelShape, sizes: EvaluationSizes) -> Operations:
    """Return the operations to compare a compressed model with its original.

    Args:
        model: the model's sizes.
        sizes: the sizes of the evaluation.
    """
    read = sizes.windows * sizes.length + sizes.answer_tokens
    predicted = sizes.windows * sizes.stride + sizes.answer_tokens
    blocks, passed = len(model.block_parameters), model.passed_parameters(sizes.vocabulary)
    products = Operations(products=_MODELS * 2 * read * passed)
    attention = _MODELS * _ATTENTION * read * sizes.length * model.hidden_size * blocks
    weights = _WEIGHT_PASSES * model.parameters + sizes.answer_tokens * passed
    numbers = _LOGIT_PASSES * predicted * sizes.vocabulary + _MODELS * weights
    seconds = _MODELS * (_LOAD_SECONDS + _TOKEN_SECONDS * blocks * sizes.answer_tokens)
    activations = activation_passes(_MODELS * _FORWARD_PASSES, model.shapes, read * model.active_part)
    others = Operations(products=attention, memory=numbers * FLOAT32_BYTES, seconds=seconds)
    return products + activations + others
