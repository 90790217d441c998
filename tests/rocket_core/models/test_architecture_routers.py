import pytest
from torch import nn

from rocket_core.models.architecture import routing_layers


class Called(nn.ModuleDict):
    """A list of experts that is called."""

    def forward(self, states):
        return states


def mixture(**parts):
    """Return a block whose mixture has experts of 8 inputs and these parts."""
    block = nn.Module()
    block.attention = nn.ModuleDict({"out": nn.Linear(4, 4)})
    block.mixture = nn.Module()
    block.mixture.experts = Called({"0": nn.Linear(8, 8), "1": nn.Linear(8, 3)})
    for name, part in parts.items():
        setattr(block.mixture, name, part)
    return block


@pytest.mark.parametrize("router", [nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 4))])
def test_parts_that_return_no_hidden_states_route_tokens(router):
    block = mixture(router=router, shared=nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)), gate=nn.Linear(8, 1))
    assert [*routing_layers(block, 8)] == [module for module in router.modules() if isinstance(module, nn.Linear)]


def test_a_block_without_experts_routes_no_tokens():
    block = mixture(router=nn.Linear(8, 4))
    block.mixture.experts = nn.ModuleList([nn.Linear(8, 4)])
    assert not [*routing_layers(block, 8)]
