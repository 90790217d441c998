"""LLM-Pruner: a Llama without its least important heads and channels; used by `benchmarks.paper_rivals`.

Written from Ma et al., "LLM-Pruner: On the structural pruning of large language models", 2023. What depends on each
other is pruned together: a key and value head with its query heads, or a channel of a feed-forward network, each with
its rows of the layers that write it and its columns of the layer that reads it. The importance of a group is the sum of
|w dL/dw| over its weights, with the gradient of the loss on the calibration windows (the paper's first-order estimate
per element). The first eighth of the blocks and the last sixteenth stay whole, at least one of each, as in the paper's
pruning of LLaMA-7B by blocks. All others lose the same part of their groups.

Simplified: heads are rounded to the nearest whole number, at least one is kept, and channels make up for the rest.
Calibration takes all windows instead of ten samples; nothing is trained afterwards. Pruned weights are set to zero,
which computes the same as without them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.rival_programs.llama_blocks import linear_parameters, linears, next_token_loss, single_windows


def compress(model: Any, windows: Tensor, ratio: float, _seed: int) -> float:
    """Prune a model in place.

    Args:
        model: a Llama for causal language modelling, in evaluation mode.
        windows: token ids of calibration text, (windows, length).
        ratio: part of the parameters of the blocks' linear layers to remove, [0, 1).
        _seed: not used; nothing is random.

    Returns:
        The part that was removed.

    Raises:
        ValueError: the blocks that are pruned have too few parameters for the ratio.
    """
    total, blocks = linear_parameters(model), model.model.layers
    whole_first, whole_last = max(1, round(len(blocks) / 8)), max(1, round(len(blocks) / 16))
    pruned = blocks[whole_first : len(blocks) - whole_last]
    part = ratio * len(blocks) / len(pruned)
    if part >= 1:
        raise ValueError(f"a ratio of {ratio} is out of reach with {len(pruned)} of {len(blocks)} blocks pruned")
    _add_gradients(model, windows)
    removed = sum(_prune(block, model.config, part) for block in pruned)
    model.zero_grad(set_to_none=True)
    return removed / total


def _add_gradients(model: Any, windows: Tensor) -> None:
    """Compute the gradient of the loss on all windows for the blocks' weights."""
    model.requires_grad_(requires_grad=False)
    for block in model.model.layers:
        for layer in linears(block).values():
            layer.weight.requires_grad = True
    for window in single_windows(windows):
        torch.autograd.backward(next_token_loss(model, window))


@torch.no_grad()
def _prune(block: Any, config: Any, part: float) -> int:
    """Set the least important groups of a block to zero, and return how many weights these are."""
    layers = linears(block)
    importance = {}
    for name, layer in layers.items():
        assert layer.weight.grad is not None
        importance[name] = (layer.weight * layer.weight.grad).abs()
    budget = part * sum(layer.weight.numel() for layer in layers.values())
    heads: int = config.num_key_value_heads
    width: int = config.hidden_size
    # Rows of q, k and v, and columns of o, that belong to one key and value head.
    rows = {name: len(layers[name].weight) // heads for name in ("q_proj", "k_proj", "v_proj")}
    head_size = width * (2 * rows["q_proj"] + rows["k_proj"] + rows["v_proj"])
    of_heads = sum(importance[name].reshape(heads, -1).sum(1) for name in rows)
    of_heads = of_heads + importance["o_proj"].sum(0).reshape(heads, -1).sum(1)
    dropped_heads = min(round(part * heads), heads - 1)
    dropped = torch.topk(of_heads, dropped_heads, largest=False).indices.tolist()
    for head in dropped:
        for name, count in rows.items():
            layers[name].weight[head * count : (head + 1) * count] = 0
        layers["o_proj"].weight[:, head * rows["q_proj"] : (head + 1) * rows["q_proj"]] = 0
    of_channels = importance["gate_proj"].sum(1) + importance["up_proj"].sum(1) + importance["down_proj"].sum(0)
    dropped_channels = min(math.ceil((budget - dropped_heads * head_size) / (3 * width)), len(of_channels) - 1)
    channels = torch.topk(of_channels, max(0, dropped_channels), largest=False).indices
    layers["gate_proj"].weight[channels] = 0
    layers["up_proj"].weight[channels] = 0
    layers["down_proj"].weight[:, channels] = 0
    return dropped_heads * head_size + len(channels) * 3 * width
