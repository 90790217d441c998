"""Learned ranks: low-rank factors whose ranks are trained under a budget; used by `benchmarks.paper_rivals`.

Written from Xv et al., "ARA: Adaptive rank allocation for efficient large language model SVD compression", 2025, with
the penalty and the sampling of Gao et al., "Adaptive rank selections for low-rank approximation of language models"
(ARS), 2024. Each layer is decomposed as in SVD-LLM, by the singular vectors of its weight times the whitening factor of
its inputs, and each has a softmax over stairs: ranks in equal steps of parameters, and the dense weight as the last.
The probability that a singular value is kept is the sum over the stairs that keep it, so that the mask never increases.
A stair is drawn for each layer in each step, with the gradient of the probability (straight-through), and the softmax
is cooled until it nearly decides. The loss is the cross entropy on a calibration window plus `16 log(max(T, B) / B)`,
for T expected parameters and a budget of B. Weights are not trained.

Simplified: the dense weight is a stair, in place of ARA's additional loss that leads there; ARS predicts masks with a
recurrent network, here every layer has its own logits. At the end each layer gets the stair with the largest logit less
a price per parameter, the smallest with which all are within the budget. Whitening takes the inputs of the dense model.
Steps, learning rate and temperatures are those with the least loss on calibration text of stories260K, of a few tried.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rival_programs.llama_blocks import linear_parameters, linears, next_token_loss, single_windows

_STAIRS = 40
_STEPS = 192
_LEARNING_RATE = 0.1
_PENALTY = 16.0
# Temperature of the softmax at the end, from 1 at first.
_COLDEST = 0.1
# Standard deviation of the stairs around the budget at first, in parts of a layer's parameters.
_SPREAD = 0.2
# Inputs of these layers are those of the layer named.
_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


class _StairLinear(nn.Module):
    """A linear layer with a mask over the leading directions of its outputs.

    Args:
        weight: W, (d_out, d_in).
        gram: second moments of the inputs, (d_in, d_in), in float64.
        kept: part of the parameters that the first distribution of stairs is around.
    """

    def __init__(self, weight: Tensor, gram: Tensor, kept: float) -> None:
        super().__init__()
        d_out, d_in = weight.shape
        self.weight = weight
        # The left singular vectors U of W L for a Gram matrix L L^T; the best factors of rank k are U_k and U_k^T W.
        wide = weight.double()
        vectors = torch.linalg.eigh(wide @ gram @ wide.mT).eigenvectors.flip(1)[:, : min(d_in, d_out)]
        self.outer = vectors.to(weight.dtype)
        self.inner = self.outer.mT @ weight
        parts = torch.arange(1, _STAIRS + 1) / _STAIRS
        # The last stair is the dense weight, whose directions all count.
        self.ranks = (parts * d_in * d_out / (d_in + d_out)).int().clamp(min=1)
        self.costs = self.ranks * (d_in + d_out)
        self.ranks[-1], self.costs[-1] = min(d_in, d_out), d_in * d_out
        self.steps = (torch.arange(min(d_in, d_out)) < self.ranks[:, None]).to(weight.dtype)
        self.temperature = 1.0
        self.logits = nn.Parameter(-(((parts - kept) / _SPREAD) ** 2) / 2)

    def forward(self, inputs: Tensor) -> Tensor:
        probabilities = self.probabilities()
        expected = probabilities @ self.steps
        drawn = self.steps[int(torch.multinomial(probabilities.detach(), 1))]
        mask = drawn + expected - expected.detach()
        output: Tensor = ((inputs @ self.inner.mT) * mask) @ self.outer.mT
        return output

    def expected_cost(self) -> Tensor:
        """Return the expected number of parameters."""
        return self.probabilities() @ self.costs.to(self.logits.dtype)

    def probabilities(self) -> Tensor:
        """Return the probability of each stair."""
        return (self.logits / self.temperature).softmax(0)

    def stair(self, price: float) -> int:
        """Return the stair with the largest logit less the price of its parameters."""
        return int((self.logits.detach().double() - price * self.costs).argmax())

    def climbs(self, index: int, stair: int, left: float) -> list[tuple[float, int, int]]:
        """Return (gain per parameter, index, stair) of the higher stairs that cost no more than is left."""
        logits, costs = self.logits.tolist(), self.costs.tolist()
        return [
            ((logits[higher] - logits[stair]) / (costs[higher] - costs[stair]), index, higher)
            for higher in range(stair + 1, _STAIRS)
            if costs[stair] < costs[higher] <= costs[stair] + left
        ]

    def truncated(self, stair: int) -> Tensor:
        """Return the weight, (d_out, d_in), with the rank of a stair."""
        if stair == _STAIRS - 1:
            return self.weight
        rank = int(self.ranks[stair])
        product: Tensor = self.outer[:, :rank] @ self.inner[:rank]
        return product


def compress(model: Any, windows: Tensor, ratio: float, seed: int) -> float:
    """Replace the weights of a model by ones of learned ranks.

    Args:
        model: a Llama for causal language modelling, in evaluation mode.
        windows: token ids of calibration text, (windows, length).
        ratio: part of the parameters of the blocks' linear layers to remove, [0, 1).
        seed: of the drawn stairs and the order of the windows.

    Returns:
        The part that was removed.
    """
    total = linear_parameters(model)
    budget = (1 - ratio) * total
    model.requires_grad_(requires_grad=False)
    moments = _second_moments(model, windows)
    places = [(block, name, layer) for block in model.model.layers for name, layer in linears(block).items()]
    layers = []
    for (block, name, layer), gram in zip(places, moments, strict=True):
        layers.append(_StairLinear(layer.weight.detach(), gram, 1 - ratio))
        _set_layer(block, name, layers[-1])
    _train(model, layers, windows, budget, seed)
    stairs = _within(layers, budget)
    for (block, name, layer), masked, stair in zip(places, layers, stairs, strict=True):
        layer.weight.copy_(masked.truncated(stair))
        _set_layer(block, name, layer)
    return 1 - sum(int(layer.costs[stair]) for layer, stair in zip(layers, stairs, strict=True)) / total


def _train(model: Any, layers: list[_StairLinear], windows: Tensor, budget: float, seed: int) -> None:
    """Train the logits of the stairs."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam([layer.logits for layer in layers], lr=_LEARNING_RATE)
    order = torch.cat([torch.randperm(len(windows)) for _ in range(-(-_STEPS // len(windows)))])[:_STEPS]
    for step, index in enumerate(order.tolist()):
        for layer in layers:
            layer.temperature = 1 - (1 - _COLDEST) * step / _STEPS
        loss = next_token_loss(model, windows[index : index + 1])
        cost = torch.stack([layer.expected_cost() for layer in layers]).sum()
        torch.autograd.backward(loss + _PENALTY * (cost.clamp(min=budget) / budget).log())
        optimizer.step()
        optimizer.zero_grad()


def _within(layers: list[_StairLinear], budget: float) -> list[int]:
    """Return the stair of each layer at the smallest price with which all are within a budget, which is then filled."""
    low, high = 0.0, 1.0
    for _ in range(60):
        price = (low + high) / 2
        cost = sum(int(layer.costs[layer.stair(price)]) for layer in layers)
        low, high = (low, price) if cost <= budget else (price, high)
    stairs = [layer.stair(high) for layer in layers]
    left = budget - sum(int(layer.costs[stair]) for layer, stair in zip(layers, stairs, strict=True))
    # Layers of equal price change at once; those that gain most for their parameters come first.
    while steps := [step for index, layer in enumerate(layers) for step in layer.climbs(index, stairs[index], left)]:
        _, index, stair = max(steps)
        left -= int(layers[index].costs[stair] - layers[index].costs[stairs[index]])
        stairs[index] = stair
    return stairs


@torch.no_grad()
def _second_moments(model: Any, windows: Tensor) -> list[Tensor]:
    """Return the Gram matrices of the inputs of the blocks' layers, in float64; equal inputs share a tensor."""
    moments, hooks = [], []
    for block in model.model.layers:
        found: dict[str, Tensor] = {}
        for name, layer in linears(block).items():
            if name not in _SAME_INPUT:
                found[name] = torch.zeros(layer.in_features, layer.in_features, dtype=torch.float64)
                hooks.append(layer.register_forward_pre_hook(functools.partial(_add_moments, found[name])))
            moments.append(found[_SAME_INPUT.get(name, name)])
    for window in single_windows(windows):
        model(input_ids=window, use_cache=False)
    for hook in hooks:
        hook.remove()
    return moments


def _add_moments(gram: Tensor, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    rows = inputs[0].reshape(-1, len(gram))
    gram.add_((rows.mT @ rows).double())


def _set_layer(block: Any, name: str, layer: nn.Module) -> None:
    setattr(block.self_attn if hasattr(block.self_attn, name) else block.mlp, name, layer)
