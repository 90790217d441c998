"""Gradients of the pass back over a model's blocks, as the tensors of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocket_core.calibration.scaled_gradient import ScaledGradient
from rocket_core.checkpoint import TensorEntry


@dataclass(kw_only=True, slots=True)
class Gradients:
    """Current gradients of the pass back, batch by batch.

    Attributes:
        hidden: gradients with respect to the hidden states.
        sides: in a decoder, the sums so far of the gradients with respect to each tensor that its blocks receive from
            the encoder's output.
    """

    hidden: list[ScaledGradient]
    sides: list[list[ScaledGradient]] = field(default_factory=list)


def batch_key(batch: int) -> str:
    """Return the name of a batch's tensor."""
    return f"batch.{batch:05}"


def gradient_tensors(gradients: Gradients, tokens: int) -> dict[str, Tensor]:
    """Return gradients as tensors by name.

    Args:
        gradients: the gradients.
        tokens: number of tokens that they were computed on.
    """
    sides = {
        _side_key(batch, side): gradient
        for batch, found in enumerate(gradients.sides)
        for side, gradient in enumerate(found)
    }
    of_hidden = {batch_key(batch): gradient for batch, gradient in enumerate(gradients.hidden)}
    scaled = {**of_hidden, **sides}
    return {
        "tokens": torch.tensor(tokens),
        **{f"{key}.exponent": torch.tensor(gradient.exponent) for key, gradient in scaled.items()},
        **{key: gradient.values for key, gradient in scaled.items()},
    }


def read_gradients(
    entries: Mapping[str, TensorEntry], batches: int, handed: Sequence[Sequence[Tensor]], device: torch.device
) -> Gradients:
    """Return gradients from stored tensors; those of side inputs that are not stored are zero.

    Args:
        entries: the tensors by name.
        batches: number of batches.
        handed: the side inputs of each batch.
        device: where the gradients are needed.
    """
    hidden = [_read(entries, batch_key(batch), device) for batch in range(batches)]
    sides = [
        [
            _read(entries, _side_key(batch, side), device)
            if _side_key(batch, side) in entries
            else ScaledGradient(values=torch.zeros_like(tensor), exponent=0)
            for side, tensor in enumerate(tensors)
        ]
        for batch, tensors in enumerate(handed)
    ]
    return Gradients(hidden=hidden, sides=sides)


def _read(entries: Mapping[str, TensorEntry], key: str, device: torch.device) -> ScaledGradient:
    exponent = int(entries[f"{key}.exponent"].read())
    return ScaledGradient(values=entries[key].read().to(device), exponent=exponent)


def _side_key(batch: int, side: int) -> str:
    return f"side.{batch:05}.{side}"
