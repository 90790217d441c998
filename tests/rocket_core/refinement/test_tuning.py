"""Tuning of a block towards given outputs."""

import copy

import pytest
import torch
from torch import nn

from rocket_core.linalg.entropy_rounding import StepScales, round_each
from rocket_core.refinement import BlockTuning, LearntCodes
from rocket_core.refinement import tuning as module

WIDTH, BATCHES = 24, 16


class Block(nn.Module):
    """A residual block with a norm, a layer of learnt codes and a layer of numbers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        rounded = round_each(weight, StepScales.of(weight, torch.full((WIDTH,), 0.2)).at(1.0))
        self.first = LearntCodes(rounded, weight.T, None)
        self.last = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.last.weight.copy_((torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).half())
            self.last.bias.zero_()

    def forward(self, hidden):
        return hidden + self.last(torch.tanh(self.first(self.norm(hidden))))


NUMBERS = dict.fromkeys(("norm.weight", "norm.bias", "last.weight", "last.bias"), torch.float16)


def make_tuning(block, noise=0.3, seed=1, readout=None):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(4, 16, WIDTH, generator=generator) for _ in range(BATCHES)]
    wanted = copy.deepcopy(block)
    with torch.no_grad():
        wanted.first.position.add_(noise * torch.randn(WIDTH, WIDTH, generator=generator))
        wanted.last.weight.add_(0.1 * noise * torch.randn(WIDTH, WIDTH, generator=generator))
        targets = [wanted(hidden) for hidden in inputs]

    def further(batch, hidden):
        return (hidden @ readout - targets[batch] @ readout).square().sum() / hidden[..., 0].numel()

    tuning = BlockTuning(
        block, lambda batch: block(inputs[batch]), targets, NUMBERS, None if readout is None else further
    )
    return tuning, inputs, targets


def held_out_error(block, inputs, targets):
    """Return the mean squared difference per token in float64, on every eighth batch."""
    block = copy.deepcopy(block).double()
    errors = [
        (block(inputs[batch].double()) - targets[batch].double()).square().sum(dim=-1).mean()
        for batch in range(0, BATCHES, 8)
    ]
    return float(torch.stack(errors).mean())


def test_a_block_comes_closer_on_batches_it_is_not_trained_on():
    block = Block()
    tuning, inputs, targets = make_tuning(block)
    with torch.no_grad():
        before = held_out_error(block, inputs, targets)
    errors = tuning.complete(seed=0, on_step=lambda _part: None)
    assert errors.before == pytest.approx(before, rel=1e-4)
    assert errors.after < 0.5 * errors.before
    with torch.no_grad():
        assert held_out_error(block, inputs, targets) == pytest.approx(errors.after, rel=1e-3)


def test_what_follows_the_block_decides_where_it_may_err():
    readout = torch.eye(WIDTH)[:, :4]
    errors = {}
    for name, read in (("own", None), ("further", readout)):
        block = Block()
        tuning, inputs, targets = make_tuning(block, readout=read)
        found = tuning.complete(seed=0, on_step=lambda _part: None)
        assert found.after < 0.5 * found.before
        with torch.no_grad():
            missed = torch.cat([block(inputs[batch]) - targets[batch] for batch in range(0, BATCHES, 8)])
        errors[name] = missed.square().mean(dim=(0, 1))
    parts = {name: float(found[:4].sum() / found.sum()) for name, found in errors.items()}
    assert parts["further"] < 0.9 * parts["own"]


def test_both_errors_count_as_agreed_before_tuning():
    block = Block()
    tuning, _, _ = make_tuning(block, readout=100 * torch.eye(WIDTH)[:, :4])
    tuning._weigh()
    with torch.no_grad():
        own, further = (
            torch.stack(parts).mean() for parts in zip(*map(tuning._parts, range(0, BATCHES, 8)), strict=True)
        )
        whole = torch.stack([tuning._error(batch) for batch in range(0, BATCHES, 8)]).mean()
    assert float(whole) == pytest.approx(float(own), rel=1e-5)
    assert float(0.9 * own) == pytest.approx(float(tuning._worth * further), rel=1e-5)


def test_the_state_left_is_as_stored():
    block = Block()
    tuning, _, _ = make_tuning(block)
    size = block.first.coded_bytes_before
    tuning.complete(seed=0, on_step=lambda _part: None)
    for name, dtype in NUMBERS.items():
        number = block.get_parameter(name)
        assert torch.equal(number, number.to(dtype).float()), name
    assert block.first.coded_bytes() <= size


def test_a_block_that_only_gets_worse_is_left_as_it_was(monkeypatch):
    block = Block()
    before = copy.deepcopy(block.state_dict())
    tuning, _, _ = make_tuning(block, noise=1e-3)
    monkeypatch.setattr(module, "_NUMBERS_STEP", 30.0)
    monkeypatch.setattr(module, "_CODES_STEP", 30.0)
    errors = tuning.complete(seed=0, on_step=lambda _part: None)
    assert errors.after == errors.before
    after = block.state_dict()
    assert all(torch.equal(after[name].half(), before[name].half()) for name in before)


def test_a_perfect_block_is_left_alone():
    block = Block()
    tuning, _, _ = make_tuning(block, noise=0.0)
    errors = tuning.complete(seed=0, on_step=lambda _part: None)
    assert (errors.before, errors.after) == (0.0, 0.0)


def test_equal_seeds_give_equal_bytes():
    states = []
    for _ in range(2):
        block = Block()
        make_tuning(block)[0].complete(seed=3, on_step=lambda _part: None)
        states.append(block.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_it_can_be_stopped_at_any_step():
    parts = []

    def stop(part):
        parts.append(part)
        if len(parts) == 5:
            raise KeyboardInterrupt

    tuning, _, _ = make_tuning(Block())
    with pytest.raises(KeyboardInterrupt):
        tuning.complete(seed=0, on_step=stop)
    assert parts == [step / module.STEPS for step in range(5)]


def test_gradients_agree_with_finite_differences():
    block = Block()
    tuning, inputs, targets = make_tuning(block)
    tuning._error(1).backward()
    exact = copy.deepcopy(block).double()

    def error():
        with torch.no_grad():
            difference = exact(inputs[1].double()) - targets[1].double()
            return float(difference.square().sum(dim=-1).mean())

    for name in NUMBERS:
        gradient = block.get_parameter(name).grad.double().flatten()
        values = exact.get_parameter(name).data.flatten()
        for place in (0, len(values) // 2, len(values) - 1):
            start, step = float(values[place]), 1e-5
            values[place] = start + step
            above = error()
            values[place] = start - step
            below = error()
            values[place] = start
            assert (above - below) / (2 * step) == pytest.approx(float(gradient[place]), rel=1e-2, abs=1e-4), name
