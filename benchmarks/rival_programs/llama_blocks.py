"""Blocks of a Llama, which the programs of the paper's rivals compress."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def linears(block: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a block by name."""
    return {name: getattr(block.self_attn, name) for name in ATTENTION} | {
        name: getattr(block.mlp, name) for name in FEED_FORWARD
    }


def linear_parameters(model: Any) -> int:
    """Return the parameters of the linear layers of all blocks.

    Raises:
        ValueError: a layer has a bias, which the rivals' programs do not compress.
    """
    layers = [layer for block in model.model.layers for layer in linears(block).values()]
    if any(layer.bias is not None for layer in layers):
        raise ValueError("linear layers with a bias are not compressed; choose a Llama without")
    return sum(layer.weight.numel() for layer in layers)


def next_token_loss(model: Any, window: Tensor) -> Tensor:
    """Return the mean cross entropy of the tokens of a window, (1, length), in nats."""
    logits = model(input_ids=window, use_cache=False).logits
    return nn.functional.cross_entropy(logits[0, :-1].float(), window[0, 1:])


def single_windows(windows: Tensor) -> Iterator[Tensor]:
    """Yield the windows of (windows, length) as batches of one."""
    yield from torch.split(windows, 1)
