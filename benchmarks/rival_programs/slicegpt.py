"""SliceGPT: a Llama without the least principal components of its hidden states; used by `benchmarks.paper_rivals`.

Written from Ashkboos et al., "SliceGPT: Compress large language models by deleting rows and columns", 2024. The weights
of each RMSNorm are multiplied into the linear layers after it. The hidden states before each norm are then expressed in
the eigenvectors of the second moments of the norm's outputs, of which those with the largest eigenvalues are kept. Each
norm has its own eigenvectors, so that two shortcut matrices per block, Q_before^T Q_after, rotate the residual; they
are parameters that the method adds. The width is the largest whose linear layers and shortcuts are within the budget,
and the same for all norms. Eigenvectors are those of the model whose earlier blocks are sliced already.

Simplified: widths are not rounded to a multiple of 8, and nothing is trained afterwards. Embeddings and head are sliced
too, and no longer share their weights; neither this nor their smaller width counts.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rival_programs.llama_blocks import linear_parameters, linears, single_windows


class _Norm(nn.Module):
    """RMSNorm without weights; the mean is over the width before slicing, as deleted components count as 0."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self._width = width
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().sum(-1, keepdim=True) / self._width + self._epsilon)


class _SlicedBlock(nn.Module):
    """A block whose residual is multiplied by a shortcut matrix before each addition.

    Args:
        block: the original block, whose layers are taken over.
        norm: for the inputs of both parts.
    """

    def __init__(self, block: Any, norm: _Norm) -> None:
        super().__init__()
        self.self_attn = block.self_attn
        self.mlp = block.mlp
        self.norm = norm
        self.shortcuts = nn.ParameterList()

    def attention(self, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return what the attention adds to the residual."""
        added: Tensor = self.self_attn(hidden_states=self.norm(hidden), **arguments)[0]
        return added

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Return what the feed-forward network adds to the residual."""
        added: Tensor = self.mlp(self.norm(hidden))
        return added

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        hidden = hidden @ self.shortcuts[0] + self.attention(hidden, arguments)
        output: Tensor = hidden @ self.shortcuts[1] + self.feed_forward(hidden)
        return output


def compress(model: Any, windows: Tensor, ratio: float, _seed: int) -> float:
    """Slice a model in place.

    Args:
        model: a Llama for causal language modelling, in evaluation mode.
        windows: token ids of calibration text, (windows, length).
        ratio: part of the parameters of the blocks' linear layers to remove, [0, 1). At 0 no component is deleted.
        _seed: not used; nothing is random.

    Returns:
        The part that was removed, less the shortcuts: negative at a ratio of 0.
    """
    total, blocks = linear_parameters(model), model.model.layers
    width: int = model.config.hidden_size
    kept = kept_width(total, width, len(blocks), ratio)
    with torch.no_grad():
        _slice(model, windows, kept)
    return 1 - kept / width - 2 * len(blocks) * kept * kept / total


def kept_width(total: int, width: int, blocks: int, ratio: float) -> int:
    """Return the largest width w with `total * w / width + 2 * blocks * w**2 <= (1 - ratio) * total`."""
    if ratio == 0:
        return width
    per_component = total / width
    root = math.sqrt(per_component**2 + 8 * blocks * (1 - ratio) * total)
    return int((root - per_component) / (4 * blocks))


def _slice(model: Any, windows: Tensor, kept: int) -> None:
    inner = model.model
    norm = _Norm(model.config.hidden_size, model.config.rms_norm_eps)
    arguments = _block_arguments(model, windows[:1])
    head = model.lm_head.weight * inner.norm.weight
    states = [inner.embed_tokens(window) for window in single_windows(windows)]
    basis = _leading_components(states, norm, kept)
    states = [state @ basis for state in states]
    embedded = nn.Parameter(inner.embed_tokens.weight @ basis, requires_grad=False)
    inner.embed_tokens = nn.Embedding(len(embedded), kept)
    inner.embed_tokens.weight = embedded
    for index, block in enumerate(inner.layers):
        sliced = _SlicedBlock(block, norm)
        norms = block.input_layernorm.weight, block.post_attention_layernorm.weight
        layers = linears(block)
        for name in ("q_proj", "k_proj", "v_proj"):
            _replace(layers[name], (layers[name].weight * norms[0]) @ basis)
        added = [sliced.attention(state, arguments) for state in states]
        states, basis = _advance(sliced, states, added, basis, layers["o_proj"])
        for name in ("gate_proj", "up_proj"):
            _replace(layers[name], (layers[name].weight * norms[1]) @ basis)
        added = [sliced.feed_forward(state) for state in states]
        states, basis = _advance(sliced, states, added, basis, layers["down_proj"])
        inner.layers[index] = sliced
    inner.norm = norm
    model.lm_head = nn.Linear(kept, len(head), bias=False)
    _replace(model.lm_head, head @ basis)


def _advance(
    sliced: _SlicedBlock, states: list[Tensor], added: list[Tensor], basis: Tensor, layer: nn.Linear
) -> tuple[list[Tensor], Tensor]:
    """Return hidden states after an addition and their basis; slice the layer that added, and append the shortcut.

    Args:
        sliced: the block.
        states: hidden states in the basis.
        added: what the layer adds to them, before it is sliced.
        basis: orthonormal columns, (width, kept).
        layer: the layer whose outputs are added.
    """
    sums = [state @ basis.mT + more for state, more in zip(states, added, strict=True)]
    after = _leading_components(sums, sliced.norm, basis.shape[1])
    _replace(layer, after.mT @ layer.weight)
    sliced.shortcuts.append(nn.Parameter(basis.mT @ after, requires_grad=False))
    # The residual reaches the next norm through the shortcut, as it will in the sliced model.
    return [total @ after for total in sums], after


def _leading_components(states: list[Tensor], norm: _Norm, kept: int) -> Tensor:
    """Return the eigenvectors with the largest eigenvalues of the second moments of the norm's outputs."""
    width = states[0].shape[-1]
    moments = torch.zeros(width, width, dtype=torch.float64)
    for state in states:
        rows = norm(state).reshape(-1, width)
        moments += (rows.mT @ rows).double()
    vectors: Tensor = torch.linalg.eigh(moments).eigenvectors.flip(1)[:, :kept]
    return vectors.to(states[0].dtype)


def _replace(layer: nn.Linear, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.out_features, layer.in_features = weight.shape


def _block_arguments(model: Any, window: Tensor) -> dict[str, Any]:
    """Return the arguments that the model passes to its blocks with the hidden states; all windows have the same."""
    found: dict[str, Any] = {}
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _block, _hidden, arguments: found.update(arguments), with_kwargs=True
    )
    model(input_ids=window, use_cache=False)
    hook.remove()
    return found
