import pytest
import torch
from torch import nn

from rocket_core.models.part_cache import FinishedParts


class Part(nn.Module):
    """A layer that counts its runs."""

    def __init__(self, width, *, beside=False, wide=1):
        super().__init__()
        self.layer = nn.Linear(width, wide * width)
        self.beside = beside
        self.runs = 0

    def forward(self, hidden):
        self.runs += 1
        output = self.layer(hidden)
        return (output, None) if self.beside else output


class Block(nn.Module):
    """Attention, a part called twice, a list of parts, and a feed-forward part; adds to outputs in place."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.attention = Part(width, beside=True)
        self.twice = Part(width)
        self.parts = nn.ModuleList([Part(width), Part(width, wide=4)])
        self.last = nn.Linear(4 * width, width)

    def forward(self, hidden):
        hidden = self.attention(hidden)[0].add_(hidden)
        hidden = self.twice(self.twice(hidden))
        return self.last(self.parts[1](self.parts[0](hidden)))


LAYERS = ("attention.layer", "twice.layer", "parts.0.layer", "parts.1.layer", "last")


class StopError(Exception):
    pass


def passing(block, finished, batch, hidden, *, up_to="last"):
    """Run the block until a layer is called."""

    def stop(_module, args):
        finished.reached()
        if up_to != "last":
            raise StopError
        reached.append(args[0])

    reached = []
    handle = block.get_submodule(up_to).register_forward_pre_hook(stop)
    try:
        with finished.passing(batch, hidden):
            return block(hidden)
    except StopError:
        return None
    finally:
        handle.remove()


@pytest.fixture
def block():
    return Block()


def test_completed_parts_are_not_rerun_and_results_are_equal(block):
    hidden = [torch.randn(2, 3, 8) for _ in range(2)]
    expected = [block(states) for states in hidden]
    for part in (block.attention, block.twice, *block.parts):
        part.runs = 0
    finished = FinishedParts(block, LAYERS)
    for batch, states in enumerate(hidden):
        passing(block, finished, batch, states, up_to="parts.0.layer")
        for _ in range(3):
            assert torch.equal(passing(block, finished, batch, states), expected[batch])
    assert block.attention.runs == len(hidden)
    # The cache takes no more than the block's input: attention has used all of that.
    assert block.twice.runs == 2 * 4 * len(hidden)


def test_output_after_the_target_layer_is_not_cached(block):
    hidden = torch.randn(2, 3, 8)
    finished = FinishedParts(block, LAYERS)
    for _ in range(2):
        passing(block, finished, 0, hidden, up_to="attention.layer")
    assert block.attention.runs == 2
    with torch.no_grad():
        block.attention.layer.weight.mul_(2)
    assert torch.equal(passing(block, finished, 0, hidden), block(hidden))


def test_only_the_first_call_of_a_part_is_cached(block):
    block.attention = nn.Identity()
    block.attention.forward = lambda hidden: (hidden.clone(),)
    hidden = torch.randn(2, 3, 8)
    expected = block(hidden)
    block.twice.runs = 0
    finished = FinishedParts(block, LAYERS[1:])
    passing(block, finished, 0, hidden, up_to="parts.0.layer")
    assert torch.equal(passing(block, finished, 0, hidden), expected)
    assert block.twice.runs == 2 + 1


def test_large_outputs_are_not_cached(block):
    hidden = torch.randn(2, 3, 8)
    finished = FinishedParts(block, ("parts.1.layer", "last"))
    for _ in range(2):
        passing(block, finished, 0, hidden)
    assert block.parts[1].runs == 2


def test_a_block_is_restored_after_an_error(block):
    finished = FinishedParts(block, LAYERS)
    with pytest.raises(StopError), finished.passing(0, torch.randn(2, 3, 8)):
        raise StopError
    assert not any("forward" in vars(module) for module in block.modules())


def test_nothing_is_stored_where_the_layer_is_not_reached(block):
    hidden = torch.randn(2, 3, 8)
    finished = FinishedParts(block, LAYERS)
    with finished.passing(0, hidden):
        block(hidden)
    with torch.no_grad():
        block.parts[0].layer.weight.mul_(2)
    assert torch.equal(passing(block, finished, 0, hidden), block(hidden))
