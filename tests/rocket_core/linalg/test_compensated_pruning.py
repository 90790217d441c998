"""SparseGPT against a least-squares solution after every input."""

import pytest
import torch

from rocket_core.linalg import compensated_pruning
from rocket_core.linalg.compensated_pruning import prune_with_compensation
from rocket_core.linalg.pruning import prune_at_once
from tests.reference import pruning as reference


def random_layer(d_in, d_out, seed=0, tokens=64):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d_in, d_in, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, d_in, generator=generator, dtype=torch.float64) @ mixing
    return torch.randn(d_in, d_out, generator=generator, dtype=torch.float64), inputs


def damped(inputs):
    """The inputs, and rows that add a hundredth of the mean to the diagonal of the Gram matrix."""
    part = 0.01 * inputs.square().sum(0).mean()
    return torch.cat([inputs, torch.eye(inputs.shape[1], dtype=inputs.dtype) * part.sqrt()])


@pytest.mark.parametrize("count", [1, 23, 60, 95])
@pytest.mark.parametrize("block", [3, 5, 128])
def test_it_equals_least_squares_after_every_input(count, block, monkeypatch):
    monkeypatch.setattr(compensated_pruning, "COMPENSATION_BLOCK", block)
    weight, inputs = random_layer(12, 8)
    before = weight.clone()
    pruned, support = prune_with_compensation(weight, inputs.T @ inputs, count)
    expected, kept = reference.sparsegpt(damped(inputs), weight, count, block)
    assert torch.equal(weight, before)
    assert int(support.sum()) == count
    assert torch.equal(support, kept)
    torch.testing.assert_close(pruned, expected * kept)


def test_every_entry_kept_leaves_the_weight_unchanged():
    weight, inputs = random_layer(9, 4)
    pruned, support = prune_with_compensation(weight, inputs.T @ inputs, weight.numel())
    assert support.all()
    assert torch.equal(pruned, weight)


def test_inputs_that_never_fire_cost_nothing():
    weight, inputs = random_layer(10, 6)
    inputs[:, ::2] = 0
    pruned, _ = prune_with_compensation(weight, inputs.T @ inputs, 30)
    torch.testing.assert_close(inputs @ pruned, inputs @ weight)


@pytest.mark.parametrize("seed", range(3))
def test_it_has_less_error_than_pruning_without_compensation(seed):
    weight, noise = random_layer(40, 30, seed, tokens=200)
    # Inputs that resemble each other, so that one can stand in for another.
    inputs = noise / noise.std(dim=0) + 3 * noise[:, :1] / noise[:, :1].std()
    gram = inputs.T @ inputs
    pruned, _ = prune_with_compensation(weight, gram, 600)
    wanda = weight * prune_at_once(weight, gram.diagonal(), 600, per_column=True)
    assert reference.output_error(inputs, weight, pruned) < 0.5 * reference.output_error(inputs, weight, wanda)
