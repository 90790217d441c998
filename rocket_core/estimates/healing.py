"""What healing needs, from a model's sizes: text, memory, disk and time. Loads no torch.

Numbers of passes were fitted to processor times on one thread of an AMD EPYC (Zen 5); `python -m benchmarks.duration
--heal` compares estimates with measured times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rocket_core.config import CompressionConfig
from rocket_core.estimates.footprint import ModelShape, ResourceEstimate
from rocket_core.estimates.operations import FLOAT32_BYTES, Operations, activation_passes
from rocket_core.inspection.checks.preconditions import window_length
from rocket_core.inspection.headers.model_fields import find_number, positions

# Gradient, two moments and the best values so far, of every number that is trained.
_COPIES = 4
# Copies of a batch's logits: of both models, their logarithms, and gradients.
_LOGITS = 6
# Numbers per token that the backward pass of a block needs, in multiples of the hidden size.
_ACTIVATIONS = 40
# Activations of all blocks are held up to this size, which saves a quarter of the time.
_HELD_ACTIVATIONS = 2**30
_HEADROOM = 512 * 2**20
# Logits of the windows that a whole model reads at once, and most windows.
_LOGIT_BYTES_PER_BATCH = 256 * 2**20
_LARGEST_BATCH = 16
# Steps are what an optimizer needs; batches are no larger than it takes to have this many of them.
_STEPS = 1000
_LEAST_TOKENS_PER_STEP = 1024
_MOST_TOKENS_PER_STEP = 32768
# This part of the windows is held out to choose the best values; where there is enough text, as many as this part of
# those that are read. Never are there more, so that reading them takes little of the time.
_HELD_OUT_PART = 0.1
_HELD_OUT_FOR_EACH_READ = 0.25
MOST_HELD_OUT = 32
"""Most windows that are held out."""
# How often the divergence on held-out windows is measured at most, in addition to the beginning, and steps between.
_MEASUREMENTS, _STEPS_BETWEEN = 10, 4
MEASURED_PASSES, STEP_PASSES = 2, 4
"""Passes through a model, each of one product of a weight for a token: of a measurement, one for each model, and of a
step, which goes through the compressed one forward and backward."""
# One more of a step where blocks run again.
_AGAIN = 1
# Passes over the activations of the layers and over the logits, for a step and for a measurement, and over what is
# trained for a step of the optimizer.
_STEP_ACTIVATION_PASSES, _STEP_LOGIT_PASSES = 16, 25
_MEASURED_ACTIVATION_PASSES, _MEASURED_LOGIT_PASSES = 6, 12
_TRAINED_PASSES = 30
# Operations of attention for each token, hidden unit and token of its window, for each product of a weight.
_ATTENTION = 5
_LOAD_SECONDS, _CALL_SECONDS = 0.5, 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class HealingSizes:
    """The sizes that healing depends on.

    Attributes:
        parameters: parameters of the dense model.
        trained: upper bound on the numbers that are trained: parameters of the layers that are stored compressed.
        blocks: number of blocks.
        hidden_size: numbers per token between two blocks.
        vocabulary: logits per token.
        stored_bytes: upper bound on the bytes of an artifact.
    """

    parameters: int
    trained: int
    blocks: int
    hidden_size: int
    vocabulary: int
    stored_bytes: int

    @classmethod
    def of(cls, model: ModelShape, vocabulary: int) -> "HealingSizes":
        """Return the sizes for a model whose selected layers are compressed."""
        return cls(
            parameters=model.parameters,
            trained=model.compressible_parameters,
            blocks=len(model.block_parameters),
            hidden_size=model.hidden_size,
            vocabulary=vocabulary,
            stored_bytes=model.stored_bytes,
        )

    def recomputes(self, call_tokens: int) -> bool:
        """Return whether blocks run again in the backward pass, because their activations together take much memory."""
        return self.blocks * self._block_activations(call_tokens) > _HELD_ACTIVATIONS

    def activations(self, call_tokens: int) -> int:
        """Return the bytes of what blocks hold for the backward pass."""
        if self.recomputes(call_tokens):
            inputs = self.blocks * call_tokens * self.hidden_size * FLOAT32_BYTES
            return inputs + self._block_activations(call_tokens)
        return self.blocks * self._block_activations(call_tokens)

    def _block_activations(self, call_tokens: int) -> int:
        return _ACTIVATIONS * call_tokens * self.hidden_size * FLOAT32_BYTES


def healing_footprint(sizes: HealingSizes, *, call_tokens: int) -> ResourceEstimate:
    """Estimate the memory and disk for training a compressed model towards its original.

    Memory is that of both models as a whole, in float32; of what the optimizer holds; of activations; and of logits.
    Disk is that of a checkpoint and of the healed artifact.

    Args:
        sizes: the sizes.
        call_tokens: tokens in a call of a model.
    """
    trained = _COPIES * sizes.trained * FLOAT32_BYTES
    logits = _LOGITS * call_tokens * sizes.vocabulary * FLOAT32_BYTES
    memory = 2 * sizes.parameters * FLOAT32_BYTES + trained + sizes.activations(call_tokens) + logits + _HEADROOM
    return ResourceEstimate(memory_bytes=memory, disk_bytes=trained + sizes.stored_bytes)


def batch_windows(vocabulary: int, length: int) -> int:
    """Return how many windows a whole model reads at once: so many that its logits, by far the largest, stay small.

    Args:
        vocabulary: logits per token.
        length: tokens in a window.
    """
    return max(1, min(_LARGEST_BATCH, _LOGIT_BYTES_PER_BATCH // (4 * length * vocabulary)))


def vocabulary(config: Mapping[str, object], model: ModelShape) -> int:
    """Return the vocabulary size from config.json; if absent, an upper bound from the parameters outside the blocks."""
    return find_number(config, ("vocab_size",)) or (model.parameters - sum(model.block_parameters)) // model.hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class HealingWork:
    """What healing reads, and sizes that its time depends on.

    Attributes:
        steps: steps of the optimizer.
        tokens: tokens that they read together.
        held_out_tokens: tokens that are held out.
        length: tokens in a window.
        vocabulary: logits for each token.
        trained: numbers that are trained.
        recomputes: whether blocks run again in the backward pass.
    """

    steps: int
    tokens: int
    held_out_tokens: int
    length: int
    vocabulary: int
    trained: int
    recomputes: bool

    @classmethod
    def expected(cls, config: CompressionConfig, model: ModelShape, settings: Mapping[str, Any]) -> Self | None:
        """Return what healing reads of a text that is long enough.

        Args:
            config: the compression.
            model: the model's sizes.
            settings: the content of config.json.

        Returns:
            The work; None if nothing is healed.
        """
        tokens = config.heal_tokens
        if tokens is None:
            return None
        length = window_length(positions(settings), config.calibration.sequence_length)
        read = math.ceil(tokens / length)
        sizes = HealingSizes.of(model, vocabulary(settings, model))
        windows, steps = windows_per_step(tokens, length), healing_steps(tokens, length)
        return cls(
            steps=steps,
            tokens=steps * windows * length,
            held_out_tokens=held_out_windows(read + MOST_HELD_OUT, read) * length,
            length=length,
            vocabulary=sizes.vocabulary,
            trained=sizes.trained,
            recomputes=sizes.recomputes(length * min(windows, batch_windows(sizes.vocabulary, length))),
        )


def windows_per_step(tokens: int, length: int) -> int:
    """Return how many windows a step of healing reads.

    Args:
        tokens: tokens that all steps read.
        length: tokens in a window.
    """
    return max(1, round(min(max(tokens / _STEPS, _LEAST_TOKENS_PER_STEP), _MOST_TOKENS_PER_STEP) / length))


def healing_steps(tokens: int, length: int) -> int:
    """Return the number of steps, at least 1; the arguments are as above."""
    return max(1, round(tokens / (windows_per_step(tokens, length) * length)))


def healing_measurements(steps: int) -> int:
    """Return how often the divergence on held-out windows is measured, at least 1, after the one at the beginning."""
    return max(1, min(_MEASUREMENTS, steps // _STEPS_BETWEEN))


def held_out_windows(windows: int, read: int) -> int:
    """Return how many windows to hold out.

    Args:
        windows: windows that the text fills.
        read: windows that steps read.
    """
    spare = min(int(_HELD_OUT_FOR_EACH_READ * read), windows - read)
    return min(MOST_HELD_OUT, max(1, int(_HELD_OUT_PART * windows), spare))


def healing_operations(model: ModelShape, work: HealingWork) -> Operations:
    """Return the operations to heal a compressed model, on a processor in float32.

    Args:
        model: the model's sizes.
        work: what is read.
    """
    measured = work.held_out_tokens * (1 + healing_measurements(work.steps))
    products = (STEP_PASSES + (_AGAIN if work.recomputes else 0)) * work.tokens + MEASURED_PASSES * measured
    attention = _ATTENTION * work.length * model.hidden_size * len(model.block_parameters)
    numbers = (work.tokens * _STEP_LOGIT_PASSES + measured * _MEASURED_LOGIT_PASSES) * work.vocabulary
    numbers += work.steps * _TRAINED_PASSES * work.trained
    reached = (work.tokens * _STEP_ACTIVATION_PASSES + measured * _MEASURED_ACTIVATION_PASSES) * model.active_part
    return activation_passes(1, model.shapes, reached) + Operations(
        products=products * (2 * model.passed_parameters(work.vocabulary) + attention),
        memory=numbers * FLOAT32_BYTES,
        seconds=_LOAD_SECONDS + _CALL_SECONDS * len(model.block_parameters) * work.steps,
    )
