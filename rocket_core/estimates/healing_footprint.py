"""Memory and disk that healing needs, and windows that a whole model reads at once, from a model's sizes.

Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rocket_core.estimates.footprint import ModelShape, ResourceEstimate
from rocket_core.inspection.headers.model_fields import find_number

_FLOAT32 = 4
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
            inputs = self.blocks * call_tokens * self.hidden_size * _FLOAT32
            return inputs + self._block_activations(call_tokens)
        return self.blocks * self._block_activations(call_tokens)

    def _block_activations(self, call_tokens: int) -> int:
        return _ACTIVATIONS * call_tokens * self.hidden_size * _FLOAT32


def healing_footprint(sizes: HealingSizes, *, call_tokens: int) -> ResourceEstimate:
    """Estimate the memory and disk for training a compressed model towards its original.

    Memory is that of both models as a whole, in float32; of what the optimizer holds; of activations; and of logits.
    Disk is that of a checkpoint and of the healed artifact.

    Args:
        sizes: the sizes.
        call_tokens: tokens in a call of a model.
    """
    trained = _COPIES * sizes.trained * _FLOAT32
    logits = _LOGITS * call_tokens * sizes.vocabulary * _FLOAT32
    memory = 2 * sizes.parameters * _FLOAT32 + trained + sizes.activations(call_tokens) + logits + _HEADROOM
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
