import pytest
import torch
from torch import nn

from rocket_core.models.called_lists import called_list_of, following_calls
from rocket_core.models.part_cache import called_parts


class Experts(nn.ModuleList):
    """Experts that each read the rows routed to them."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4) for _ in range(2))

    def forward(self, states, routes, *, scale):
        output = torch.zeros_like(states)
        for number, expert in enumerate(self):
            output[routes == number] = scale * expert(states[routes == number])
        return output


class Block(nn.Module):
    """A layer and a plain list, then experts for the rows above and below zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList([nn.Linear(4, 4)])
        self.inner = nn.Module()
        self.inner.experts = Experts()

    def forward(self, states):
        states = self.first[0](states)
        return self.inner.experts(states, (states[:, 0] > 0).long(), scale=float(states.detach().mean()))


def test_only_layers_of_called_lists_are_found():
    block = Block()
    assert called_list_of(block, block.first[0]) is None
    assert called_list_of(block, block.inner.experts[1]) == "inner.experts"
    assert [name for name, _ in called_parts(block)] == ["first.0", "inner"]
    assert [name for name, _ in called_parts(block.inner)] == ["experts"]


@pytest.mark.parametrize("expert", [0, 1])
def test_a_follower_routes_the_same_rows_with_its_own_states(expert):
    leader, follower = Block(), Block()
    follower.first[0] = nn.Linear(4, 4)
    states, read = torch.randn(64, 4), []
    for block in (leader, follower):
        block.inner.experts[expert].register_forward_pre_hook(lambda _, args: read.append(args[0]))
    hidden = [block.first[0](states) for block in (leader, follower)]
    rows = (hidden[0][:, 0] > 0).long() == expert
    assert not torch.equal(rows, (hidden[1][:, 0] > 0).long() == expert)
    with following_calls(leader.inner.experts, follower.inner.experts):
        leader(states)
        output = follower(states)
    assert torch.equal(read[0], hidden[0][rows])
    assert torch.equal(read[1], hidden[1][rows])
    expected = float(hidden[0].detach().mean()) * follower.inner.experts[expert](hidden[1][rows])
    assert torch.equal(output[rows], expected)
    leader(states)
    assert not torch.equal(follower(states), output)
